// Bodies of error.h, and the report of a broken invariant.

#include "remat/error.h"

#include <utility>

#include "lib/base/error.h"
#include "lib/base/invariant.h"
#include "remat/version.h"

namespace remat {

// Without a backtrace: the text is about the user's program, not ours, and stays short.
CheckpointError::CheckpointError(std::string message, Facts facts)
    : c10::Error(std::move(message), /*backtrace=*/nullptr), facts_(std::move(facts)) {}

void throw_unsupported(const std::string& fact, const std::string& cause,
                       const std::string& advice) {
  CheckpointError::Facts facts;
  facts.kind = CheckpointError::Kind::Unsupported;
  throw CheckpointError(
      fmt::format("remat::checkpoint: {}.\nCause: {}.\nHint: {}.", fact, cause, advice),
      std::move(facts));
}

void report_broken_invariant(const char* condition, const char* file, int line,
                             const std::string& message) {
  TORCH_CHECK(
      false, "remat ", REMAT_VERSION, ": internal check failed: ", condition, " (", file, ":", line,
      "). ", message,
      "\nThis is a bug in remat. Please report it with this text and the LibTorch version.");
}

}  // namespace remat
