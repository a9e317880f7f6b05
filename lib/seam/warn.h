#pragma once
// Warnings of the library, on their way to LibTorch's handler.

#include <c10/util/StringUtil.h>

#include <exception>
#include <source_location>
#include <string>

namespace remat::seam {

/// Sends it to the thread's warning handler, in the words that set_warning_words asks for. Throws
/// what the handler throws.
void warn(std::string text, const std::source_location& where = std::source_location::current());

/// What an error says, without the stack that LibTorch adds to its own.
std::string text_of(const std::exception& error);

}  // namespace remat::seam
