#pragma once
// Lets runtimes of other languages reword the library's warnings for their readers.

#include <string>

#include "remat/export.h"

namespace remat {

/// Rewords a warning's text, which names C++ code, for another language. Called on the thread that
/// warns, also under locks of the library. It must not wait for another thread (or for an
/// interpreter's lock), call the library, or throw.
using WarningWords = std::string (*)(std::string text);

/// Sets the function of the process; null: texts stay unchanged. Warnings go to LibTorch's handler
/// in both cases, as for C++ programs. A reworded warning names no source file of the library.
/// Errors of regions reach a binding in `RegionBody::raise` (binding.h). Any thread.
REMAT_API void set_warning_words(WarningWords words);

}  // namespace remat
