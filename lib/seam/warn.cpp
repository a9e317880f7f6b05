#include "lib/seam/warn.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <utility>

#include "remat/words.h"

namespace remat {

namespace {
std::atomic<WarningWords> warning_words{nullptr};
}  // namespace

void set_warning_words(WarningWords words) {
  warning_words.store(words, std::memory_order_release);
}

namespace seam {

bool has_warning_words() { return warning_words.load(std::memory_order_acquire) != nullptr; }

void warn(std::string text, const std::source_location& where) {
  const WarningWords words = warning_words.load(std::memory_order_acquire);
  if (words != nullptr) text = words(std::move(text));
  c10::warn(c10::Warning(c10::UserWarning(), {__func__, where.file_name(), where.line()},
                         std::move(text),
                         /*verbatim=*/words != nullptr));
}

std::string text_of(const std::exception& error) {
  const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

}  // namespace seam

}  // namespace remat
