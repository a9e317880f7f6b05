#include "lib/selective/collective_watch.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "lib/base/once_per_name.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/collectives.h"
#include "lib/seam/warn.h"
#include "lib/selective/call_record.h"

namespace remat {

class CollectiveWatches {
 public:
  static CollectiveWatches& get() {
    static auto* const all = new CollectiveWatches;  // leaked: graphs may die last
    return *all;
  }
  void add(CollectiveWatch& watch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    watches_.emplace(watch.storage_, &watch);
    num_watches_.store(watches_.size(), std::memory_order_release);
  }
  void remove(const CollectiveWatch& watch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [begin, end] = watches_.equal_range(watch.storage_);
    watches_.erase(
        std::find_if(begin, end, [&](const auto& each) { return each.second == &watch; }));
    num_watches_.store(watches_.size(), std::memory_order_release);
  }
  void note_written(const at::Tensor& tensor) {
    if (num_watches_.load(std::memory_order_acquire) == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [begin, end] = watches_.equal_range(storage_of(tensor));
    for (auto each = begin; each != end; ++each)
      each->second->is_written_.store(true, std::memory_order_release);
  }

 private:
  std::mutex mutex_;  // guards the map
  std::unordered_multimap<const c10::StorageImpl*, CollectiveWatch*> watches_;
  std::atomic<std::size_t> num_watches_{0};
};

CollectiveWatch::CollectiveWatch(const c10::StorageImpl* storage) : storage_(storage) {
  if (storage_ != nullptr) CollectiveWatches::get().add(*this);
}
CollectiveWatch::~CollectiveWatch() {
  if (storage_ != nullptr) CollectiveWatches::get().remove(*this);
}

void warn_of_collective(const char* op) {
  const auto* const region = detail::innermost_region();
  if (region == nullptr || !region->is_inside_recompute || seam::has_warning_words()) return;
  const std::string& name = region->region().name();
  static OncePerName warned;
  if (!warned.is_first(name)) return;
  seam::warn(c10::str(
      "remat: a recompute of ", name.empty() ? "a region" : "region \"" + name + "\"", " ran ", op,
      " again. Cause: its function communicates with other processes, and no policy keeps the "
      "result. Every process must then recompute it in the same order, or they wait for each "
      "other. Hint: CheckpointOptions::policy = remat::save_collectives()."));
}

namespace {

void saw_collective(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  visit_tensors_in(arguments_of(op, stack)[0], [](const at::Tensor& written) {
    CollectiveWatches::get().note_written(written);
  });
  // A region with a policy may have a kept result: its replay warns (Replay::run_for_real).
  auto* const region = detail::innermost_region();
  if (region != nullptr && region->operators() == nullptr)
    warn_of_collective(op.operator_name().name.c_str());
}

[[maybe_unused]] const bool watches_collectives = (seam::watch_collectives(saw_collective), true);

}  // namespace

}  // namespace remat
