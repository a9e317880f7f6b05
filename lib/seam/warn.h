#pragma once
// Sends the library's warnings to LibTorch's handler.

#include <c10/util/StringUtil.h>

#include <exception>
#include <source_location>
#include <string>

namespace remat::seam {

/// Sends a warning to the thread's handler, worded by set_warning_words(). Throws exceptions of the
/// handler.
void warn(std::string text, const std::source_location& where = std::source_location::current());

/// Returns whether a binding puts warnings into the words of its language.
bool has_warning_words();

/// Returns an error's text, without the stack that LibTorch adds.
std::string text_of(const std::exception& error);

}  // namespace remat::seam
