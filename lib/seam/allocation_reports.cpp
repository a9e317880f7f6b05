#include "lib/seam/allocation_reports.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>

namespace remat::seam {

class AllocationReports::Place final : public torch::profiler::impl::ProfilerStateBase {
 public:
  explicit Place(AllocationListener listener)
      : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(
            torch::profiler::impl::ProfilerState::Disabled, /*report_input_shapes=*/false,
            /*profile_memory=*/true)),
        listener_(listener) {}

  static void take(const std::shared_ptr<Place>& place) {
    place->before_ = c10::ThreadLocalDebugInfo::current();
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, place);
    place->entry_ = c10::ThreadLocalDebugInfo::current().get();
  }
  void end() { is_open_ = false; }
  /// Frees the places on this thread that have ended, down to one that has not.
  static void give_back() {
    for (;;) {
      auto* const top = dynamic_cast<Place*>(on_this_thread());
      if (top == nullptr || top->is_open_) return;
      if (c10::ThreadLocalDebugInfo::current().get() != top->entry_)
        return;  // another entry is above it
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::shared_ptr(top->before_));
    }
  }
  bool memoryProfilingEnabled() const override { return is_open_; }
  void reportMemoryUsage(void*, int64_t bytes, size_t live, size_t, c10::Device device) override {
    using Kind = AllocationReport::Kind;
    if (is_open_)
      listener_({bytes < 0 ? Kind::Freed : Kind::Allocated, device, bytes < 0 ? -bytes : bytes,
                 static_cast<int64_t>(live)});
  }
  void reportOutOfMemory(int64_t bytes, size_t live, size_t, c10::Device device) override {
    if (is_open_)
      listener_({AllocationReport::Kind::Refused, device, bytes, static_cast<int64_t>(live)});
  }
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

  static c10::DebugInfoBase* on_this_thread() {
    return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  }

 private:
  const AllocationListener listener_;
  std::atomic<bool> is_open_{true};                    // other threads may still hold it
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;  // the entries below it
  const c10::ThreadLocalDebugInfo* entry_ = nullptr;   // the entry that holds it
};

AllocationReports::AllocationReports(AllocationListener listener)
    : place_(std::make_shared<Place>(listener)) {
  Place::take(place_);
}

AllocationReports::~AllocationReports() {
  place_->end();
  Place::give_back();
}

bool AllocationReports::are_taken() {
  Place::give_back();
  c10::DebugInfoBase* const present = Place::on_this_thread();
  return present != nullptr && dynamic_cast<Place*>(present) == nullptr;
}

}  // namespace remat::seam
