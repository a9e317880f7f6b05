// Frame in forward, and its end.

#include "lib/frame/frame.h"

#include <algorithm>
#include <utility>

#include "lib/base/counters.h"
#include "lib/frame/layers.h"
#include "lib/frame/running_statistics.h"
#include "lib/scope/saving_input.h"

namespace remat {

namespace {

RegionName region_name(const RegionExtras* extras, const std::type_info* type) {
  return extras != nullptr && !extras->name.empty() ? RegionName(&extras->name) : RegionName(type);
}

}  // namespace

Frame::Frame(const RegionOptions& options, std::unique_ptr<RegionExtras> extras,
             const RegionInfo* around, const std::type_info* type, const char* file)
    : region_{.info = {.id = live_counters.frames_created.fetch_add(1, std::memory_order_relaxed),
                       .called = region_name(extras.get(), type),
                       .depth = around == nullptr ? 1 : around->depth + 1},
              .options = options,
              .extras = std::move(extras),
              .file = file,
              .surroundings = &surroundings_},
      surroundings_(options.preserve_rng_state) {
  region_.info.outermost = around == nullptr ? region_.info.id : around->outermost;
}

namespace {

/// The parts of a frame that may own other frames; the last is destroyed first.
struct Contents {
  CapturedOperands operands;
  std::unique_ptr<RecordedFrame> recorded;
  std::unique_ptr<UserState> user_state;
  ValuesByTask::All values;
  Inputs inputs;
  std::unique_ptr<RegionBody> body;
  std::unique_ptr<RegionExtras> extras;
  std::unique_ptr<Keeper> keeper;
};

}  // namespace

Frame::~Frame() { release_resources(); }

// Rule 13. A frame may own other frames: through the arguments of the user's function, or as slots
// of a parent. The first frame to die on a thread empties the frames that die meanwhile, one by
// one.
void Frame::release_resources() {
  if (std::exchange(is_empty_, true)) return;
  thread_local std::vector<Contents>* waiting = nullptr;
  count(live_counters.frames_ended);
  slots_.clear();
  if (waiting != nullptr) {
    waiting->push_back({std::move(operands_), std::move(recorded_), surroundings_.release(),
                        values_.release(), std::move(inputs_), std::move(region_.body),
                        std::move(region_.extras), std::move(keeper_)});
    return;
  }
  std::vector<Contents> queue;
  waiting = &queue;
  // The parts are destroyed in place: moving those of every frame would take longer.
  keeper_.reset();
  region_.extras.reset();
  region_.body.reset();
  inputs_.clear();
  values_.clear();
  surroundings_.release().reset();
  recorded_.reset();
  operands_.clear();
  while (!queue.empty()) {
    const Contents next = std::move(queue.back());
    queue.pop_back();
  }
  waiting = nullptr;
}

bool Frame::begin(std::unique_ptr<RegionBody> body, bool sees_end,
                  const std::shared_ptr<const UserRegistrations>& own) {
  region_.body = std::move(body);
  if (SlotFiller* const ended = inputs_.save(region_)) {
    if (sees_end && ended->stop_at_region()) return false;
    ended->stop();
  }
  surroundings_.begin(inputs_.storages(), own);
  if (is_recording())  // nothing throws after this
    recorded_ = layers.record(
        region_.info, inputs_.storages(),
        [&](const c10::StorageImpl& storage) { return inputs_.is_offloaded(storage); });
  start_ = RegionStart::here();
  return true;
}

int64_t Frame::add_slot(const at::Tensor& saved) {
  const at::Tensor* const origin = take_input_being_saved();
  if (recorded_ != nullptr && is_recording())
    recorded_->slot_event(recording::SlotEvent::Packed, slots_.size(),
                          TensorMetadata(saved, false).text());
  // A value kept by a region around may be captured here, which reads its present contents.
  if (notes_.sees_operators() && region_.info.depth > 1)
    detail::visit_regions([&](detail::RegionScope& scope) {
      detail::ReadWatcher* const watcher =
          scope.region().id == region_.info.id ? nullptr : scope.reads();
      if (watcher != nullptr) watcher->tensor_was_read(saved);
    });
  // A copy on the CPU of a kept value is judged as its original.
  const bool is_hashed =
      (origin == nullptr ? saved : *origin).is_cpu() && surroundings_.has_new_drawer();
  const int64_t position =
      slots_.add(region_, saved, origin, start_, inputs_.storages(), is_hashed);
  if (region_.options.debug) region_.extras->note_saver(position);
  if (keeper_ != nullptr) keeper_->slot_added(saved, position);
  return position;
}

void Frame::settle(c10::function_ref<void(TensorVisitor)> visit_result) {
  slots_.note_rest(region_);
  if (!operands_.is_empty()) operands_.settle();
  StorageSet results;
  int64_t max_elements = 0;
  visit_result([&](at::Tensor& tensor) {
    if (!tensor.defined()) return;
    results.add(tensor);
    if (!tensor.is_nested()) max_elements = std::max(max_elements, tensor.numel());
  });
  surroundings_.settle([&] {
    DevicesMet met = devices_met();
    visit_result([&](at::Tensor& tensor) { met.add(tensor); });
    return met;
  });

  if (keeper_ != nullptr) keeper_->end_naming();
  recording::RegionSums recorded;
  if (recorded_ != nullptr) recorded = slots_.sums(results);
  std::vector<const c10::StorageImpl*> statistics;
  // Under a policy, the region's end is the one that the policy was told, so it is never treated as
  // small.
  slots_.settle(
      {.results = results,
       .max_result_elements = max_elements,
       .may_end_small = keeper_ == nullptr && !region_.options.always_stops,
       .has_leaf_inputs = inputs_.has_leaf(),
       .has_run_backward = notes_.has_run_backward()},
      [this](const c10::StorageImpl* storage) {
        return keeper_ != nullptr && keeper_->may_replace(storage);
      },
      [&](const c10::StorageImpl* buffer) { statistics.push_back(buffer); });
  if (!statistics.empty())
    saw_running_statistics(region_, inputs_, surroundings_, std::move(statistics));
  surroundings_.settle_state();
  const auto lost = inputs_.settle();
  try {
    if (keeper_ != nullptr) keeper_->settle();
  } catch (...) {
    if (recorded_ != nullptr) recorded_->throws();
    throw;
  }
  if (recorded_ == nullptr) return;
  if (keeper_ != nullptr) keeper_->add_to(recorded);
  DevicesMet met = devices_met();
  visit_result([&](at::Tensor& tensor) { met.add(tensor); });
  recorded_->ends(met, std::move(recorded));
}

DevicesMet Frame::devices_met() const {
  DevicesMet met;
  inputs_.storages().visit([&](const c10::StorageImpl& storage) { met.add(storage.device()); });
  slots_.add_devices(met);
  return met;
}

void Frame::visit_outside(c10::function_ref<void(at::Tensor)> visitor) const {
  if (!slots_.may_meet_outside()) return;
  inputs_.visit_leaves(visitor);
  slots_.visit_outside(visitor);
}

}  // namespace remat
