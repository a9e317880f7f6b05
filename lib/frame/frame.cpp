#include "lib/frame/frame.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "lib/base/counters.h"
#include "lib/rng/device_claims.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/engine.h"
#include "lib/selective/selection.h"
#include "lib/tensor/content_hash.h"

namespace remat {

Frame::Frame(const FrameOptions& options, std::unique_ptr<FrameExtras> extras, int64_t depth)
    : id_(live_counters.frames_created.fetch_add(1, std::memory_order_relaxed)),
      depth_(depth),
      options_(options),
      extras_(std::move(extras)),
      forward_thread_(std::this_thread::get_id()) {}

// Rule 13. What a frame holds may own other frames: through the arguments of the user's function,
// or as slots of a parent. The first dying frame of a thread empties those that die meanwhile, one
// after the other.
struct Frame::Remains {
  std::unique_ptr<Selection> selection;
  std::unique_ptr<FrameExtras> extras;
  std::unique_ptr<detail::RegionBody> body;
  Inputs inputs;
  c10::SmallVector<std::shared_ptr<Run>, 1> runs;
  std::vector<std::pair<int64_t, at::Tensor>> pending;
  std::unique_ptr<UserState> user_state;
  std::unique_ptr<RecordedFrame> recorded;
};

Frame::~Frame() { empty(); }

void Frame::empty() noexcept {
  if (std::exchange(is_empty_, true)) return;
  thread_local std::vector<Remains>* waiting = nullptr;
  count(live_counters.frames_ended);
  if (!is_settled_) count(live_counters.tensors_dropped, static_cast<int64_t>(slots_.size()));
  std::vector<Slot>().swap(slots_);
  if (waiting != nullptr) {
    waiting->push_back({std::move(selection_), std::move(extras_), std::move(body_),
                        std::move(inputs_), std::move(runs_), std::move(pending_),
                        std::move(user_state_), std::move(recorded_)});
    return;
  }
  std::vector<Remains> queue;
  waiting = &queue;
  selection_.reset();
  extras_.reset();
  body_.reset();
  inputs_.clear();
  runs_.clear();
  pending_.clear();
  user_state_.reset();
  recorded_.reset();
  while (!queue.empty()) {
    const Remains next = std::move(queue.back());
    queue.pop_back();
  }
  waiting = nullptr;
}

const std::string& Frame::name() const {
  static const std::string none;
  return extras_ ? extras_->name : none;
}

bool Frame::compares_contents() const {
  return options_.determinism_check == DeterminismCheck::Values ||
         (extras_ && extras_->fingerprint);
}

std::string Frame::contents_of(const at::Tensor& tensor) const {
  if (!extras_ || !extras_->fingerprint) return fmt::format("{:016x}", content_hash(tensor));
  // What the user's function saves is none of the region's.
  const detail::NoScopes no_scopes;
  const seam::DispatchModeOff unseen;
  at::NoGradGuard no_grad;
  return extras_->fingerprint(tensor);
}

void Frame::begin(std::unique_ptr<detail::RegionBody> body) {
  body_ = std::move(body);
  inputs_.save(*body_, options_.offload_inputs);
  snapshot_ = Snapshot::take();
  streams_ = CurrentStreams::here();
  auto registered = UserRegistrations::around();
  if (options_.preserve_rng_state && (registered || present_accelerator()))
    device_rng_ =
        DeviceRng::take(registered ? registered->generators : c10::ArrayRef<at::Generator>());
  // What a backward runs, and the engine's threads, work for others.
  if (device_rng_ && seam::graph_task_id() < 0)
    inputs_.storages().visit([](const c10::StorageImpl& storage) { claim(storage.device()); });
  if (registered)
    user_state_ = std::make_unique<UserState>(*registered, options_.preserve_rng_state);
  if (options_.preserve_rng_state) draws_.begin();
  if (is_recording()) recorded_ = recording::region_begins(*this);  // what throws is done
  start_ = RegionStart::here();
}

DrawLog* Frame::draw_log(const c10::GeneratorImpl& generator) {
  if (!options_.preserve_rng_state) return nullptr;
  if (&generator == &draws_.generator()) return &draws_;
  if (user_state_)
    for (const auto& log : user_state_->draw_logs())
      if (&generator == &log->generator()) return log.get();
  return nullptr;
}

Selection& Frame::selection_or_make(std::shared_ptr<const PolicyRule> rule) {
  std::lock_guard<SpinLock> lock(mutex_);
  if (selection_ == nullptr) selection_ = std::make_unique<Selection>(*this, std::move(rule));
  return *selection_;
}

c10::SmallVector<DrawLog*, 1> Frame::draw_logs() {
  c10::SmallVector<DrawLog*, 1> logs;
  if (!options_.preserve_rng_state) return logs;
  logs.push_back(&draws_);
  if (user_state_)
    for (const auto& log : user_state_->draw_logs()) logs.push_back(log.get());
  return logs;
}

bool Frame::has_slot_of(const c10::StorageImpl* storage) {
  std::lock_guard<SpinLock> lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(), [storage](const Slot& slot) {
    return slot.provenance.storage._unsafe_get_target() == storage;
  });
}

DevicesMet Frame::devices_met() {
  DevicesMet met;
  inputs_.storages().visit([&](const c10::StorageImpl& storage) { met.add(storage.device()); });
  std::lock_guard<SpinLock> lock(mutex_);
  for (const Slot& slot : slots_) met.add(slot.metadata.device());
  return met;
}

std::vector<GeneratorState> Frame::device_states_at_begin() {
  if (device_rng_ == nullptr) return {};
  return device_rng_->at_begin(device_rng_->is_settled() ? DevicesMet() : devices_met());
}

bool Frame::has_new_drawer() const {
  return options_.preserve_rng_state && draws_.has_new_drawer();
}

void Frame::keep(const std::shared_ptr<StateProvider>& provider, const std::any& state) {
  if (!user_state_) user_state_ = std::make_unique<UserState>();
  user_state_->keep(provider, state);
}

void Frame::keep(const at::Generator& generator) {
  if (!options_.preserve_rng_state) return;
  if (!user_state_) user_state_ = std::make_unique<UserState>();
  user_state_->keep(generator);
  DeviceRng::add(device_rng_, generator);
}

void Frame::keep(const std::shared_ptr<HeldState>& held_state) {
  if (!user_state_) user_state_ = std::make_unique<UserState>();
  user_state_->keep(held_state);
}

void Frame::owner_waits_for_backward(Run& run) {
  std::lock_guard<SpinLock> lock(mutex_);
  run.waits_for_backward = true;
  run.tell_change();
}

void Frame::end_operator() {
  std::lock_guard<SpinLock> lock(mutex_);
  is_operator_over_ = true;
}

Frame::Noted& Frame::noted() {
  if (noted_ == nullptr) noted_ = std::make_unique<Noted>();
  return *noted_;
}

void Frame::note_backward(int64_t number, InnerBackwards::Asked asked) {
  std::lock_guard<SpinLock> lock(mutex_);
  if (!noted().backwards) noted().backwards.emplace();
  noted().backwards->note(number, std::move(asked));
}

InnerBackwards::Asked Frame::asked_by_backward(int64_t number) {
  std::lock_guard<SpinLock> lock(mutex_);
  return noted_ == nullptr || !noted_->backwards ? InnerBackwards::Asked{}
                                                 : noted_->backwards->asked(number);
}

bool Frame::has_noted_backwards() {
  std::lock_guard<SpinLock> lock(mutex_);
  return noted_ != nullptr && noted_->backwards.has_value();
}

void Frame::note_accumulation(const torch::autograd::edge_list& roots) {
  AccumulatedLeaves all = accumulated_leaves();
  all.add_below(roots);
  std::lock_guard<SpinLock> lock(mutex_);
  noted().accumulated = std::move(all);
}

AccumulatedLeaves Frame::accumulated_leaves() {
  std::lock_guard<SpinLock> lock(mutex_);
  return noted_ == nullptr ? AccumulatedLeaves() : noted_->accumulated;
}

void Frame::note_hook(const at::TensorBase& tensor, unsigned handle) {
  std::lock_guard<SpinLock> lock(mutex_);
  noted().hooks.add(tensor, handle, has_run_backward());
}

std::optional<HookNotes::Note> Frame::noted_hook(const at::TensorBase& tensor, std::size_t number) {
  std::lock_guard<SpinLock> lock(mutex_);
  const HookNotes::Note* const note =
      noted_ == nullptr ? nullptr : noted_->hooks.find(tensor, number);
  return note == nullptr ? std::nullopt : std::optional(*note);
}

bool Frame::has_hook_after_backward() {
  std::lock_guard<SpinLock> lock(mutex_);
  return noted_ != nullptr && noted_->hooks.any_follows_backward();
}

void Frame::visit_outside(c10::function_ref<void(at::Tensor)> visitor) {
  if (!may_meet_outside_) return;
  inputs_.visit_leaves(visitor);
  c10::SmallVector<c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>, 8> alive;
  {
    std::lock_guard<SpinLock> lock(mutex_);
    const c10::TensorImpl* latest = nullptr;  // several slots of one weight often follow each other
    for (const Slot& slot : slots_) {
      const Provenance& from = slot.provenance;
      if (from.origin != Origin::Leaf && from.origin != Origin::Outside) continue;
      if (from.leaf._unsafe_get_target() == std::exchange(latest, from.leaf._unsafe_get_target()))
        continue;
      if (auto leaf = from.leaf.lock()) alive.push_back(std::move(leaf));
    }
  }
  for (auto& each : alive) visitor(at::Tensor(std::move(each)));
}

}  // namespace remat
