#pragma once
// The guards that keep saved tensors elsewhere, each in turn.

#include <memory>
#include <utility>

#include "remat/place.h"
#include "remat/tiers.h"
#include "tests/support/files.h"

namespace remat::testing {

/// Words of LibTorch's error about a saved tensor that was changed in place.
inline constexpr auto changed_in_place = "modified by an inplace operation";

/// A place of a program's own. `is_late`: it copies as late as it may.
class InMemory final : public remat::Place {
 public:
  explicit InMemory(bool is_late) : is_late_(is_late) {}
  std::shared_ptr<remat::StoredContents> begin_store(const Tensor& flat) override {
    return std::make_shared<Copy>(flat, is_late_);
  }

 private:
  class Copy final : public remat::StoredContents {
   public:
    Copy(const Tensor& flat, bool is_late)
        : is_late_(is_late), held_(is_late ? flat : flat.clone()) {}
    bool is_stored_late() const override { return is_late_; }
    void finish_store() override { held_ = held_.clone(); }
    void begin_load() override { loaded_ = held_.clone(); }
    void cancel_load() override { loaded_.reset(); }
    Tensor finish_load() override {
      return loaded_.defined() ? std::exchange(loaded_, Tensor()) : held_.clone();
    }

   private:
    const bool is_late_;
    Tensor held_, loaded_;
  };
  const bool is_late_;
};

/// Calls `f(make)` for each guard, where `make` returns one that moves tensors of any size.
template <class F>
void with_each_guard(F&& f) {
  const Folder folder;
  const auto on_cpu = [] { return std::make_unique<remat::SaveOnCpuGuard>(); };
  const auto on_disk = [&] {
    return std::make_unique<remat::SaveOnDiskGuard>(
        remat::SaveOnDiskOptions{.directory = folder.path(), .min_bytes = 0});
  };
  const auto in_tiers = [&] {
    return std::make_unique<remat::SaveInTiersGuard>(
        remat::SaveInTiersOptions{.host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
  };
  const auto as_itself = [] { return std::make_unique<remat::SaveAsGuard>(at::kDouble); };
  const auto elsewhere = [](bool is_late) {
    return [is_late] {
      return std::make_unique<remat::SaveElsewhereGuard>(
          std::make_unique<InMemory>(is_late),
          remat::SaveElsewhereOptions{.max_bytes_in_flight = 1 << 10});
    };
  };
  {
    INFO("SaveOnCpuGuard");
    f(on_cpu);
  }
  {
    INFO("SaveOnDiskGuard");
    f(on_disk);
  }
  {
    INFO("SaveAsGuard");
    f(as_itself);
  }
  {
    INFO("SaveInTiersGuard");
    f(in_tiers);
  }
  {
    INFO("SaveElsewhereGuard");
    f(elsewhere(false));
  }
  {
    INFO("SaveElsewhereGuard, stored late");
    f(elsewhere(true));
  }
}

/// Every tensor goes to a file in `folder`.
inline remat::SaveOnDiskOptions all_in(const Folder& folder) {
  return {.directory = folder.path(), .min_bytes = 0};
}

}  // namespace remat::testing
