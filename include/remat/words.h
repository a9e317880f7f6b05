#pragma once
// For runtimes of other languages: the library's warnings in the words of those who read them.

#include <string>

#include "remat/export.h"

namespace remat {

/// Makes of a warning's text, which names what C++ programs write, one of another language. Called
/// on the thread that warns, under locks of the library too: it waits for nobody (an interpreter's
/// lock among them), calls nothing of the library and throws nothing.
using WarningWords = std::string (*)(std::string text);

/// Sets it for the process; null: texts are as they are. Warnings go to LibTorch's handler before
/// and after, as they do for C++ programs; what has been through `words` names no source file of
/// the library. Errors of regions reach a binding in `RegionBody::raise` (binding.h). Any thread.
REMAT_API void set_warning_words(WarningWords words);

}  // namespace remat
