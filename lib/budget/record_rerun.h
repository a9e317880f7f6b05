#pragma once
// One rerun of a recorded call.

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "lib/budget/runtime.h"

namespace remat::budget {

/// An error about a rerun. It is thrown under the lock, and converted for a binding after the lock.
class RerunError final : public c10::Error {
 public:
  using Error::Error;
};

/// Makes the streams of forward current for its lifetime. They wait for the streams that were
/// current before, and those wait for them at the end.
class OnOwnStreams {
 public:
  explicit OnOwnStreams(c10::ArrayRef<c10::Stream> own);
  ~OnOwnStreams();
  OnOwnStreams& operator=(OnOwnStreams&&) = delete;

 private:
  c10::SmallVector<c10::Stream, 1> before_;
};

/// One rerun of a record. It owns the contents that the record reads.
class Rerun {
 public:
  Rerun(Record& record, const Runtime& runtime, Dead& dead);
  void run();
  /// Takes the results. The caller holds the lock.
  void end(Dead& dead);
  /// Returns the bytes of the contents made, and the device of the last one, after `end`.
  int64_t made_bytes() const { return made_bytes_; }
  c10::Device device() const { return device_; }

 private:
  Record& record_;
  struct Content {
    Value* value;
    c10::Storage storage;
    bool is_written = false, is_stolen = false;
  };
  c10::SmallVector<Content, 4> contents_;
  c10::SmallVector<c10::Storage, 2> made_;
  c10::SmallVector<c10::Stream, 1> streams_;
  int64_t made_bytes_ = 0;
  c10::Device device_ = c10::kCPU;
};

}  // namespace remat::budget
