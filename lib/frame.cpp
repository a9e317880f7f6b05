#include "lib/frame.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lib/accelerator.h"
#include "lib/backwards.h"
#include "lib/counters.h"
#include "lib/digest.h"
#include "lib/hook_stack.h"
#include "lib/invariant.h"
#include "lib/match.h"
#include "lib/operator_sight.h"
#include "lib/planted_fault.h"
#include "lib/recompute.h"
#include "lib/selection.h"

namespace remat {

namespace {

/// A tail that writes at most this many elements costs less than the throw that would skip it.
constexpr int64_t max_small_tail = 4096;

/// The number of slots of the frame that this thread settled last: regions repeat.
thread_local std::size_t expected_slots = 4;

std::size_t at_position(int64_t position) { return static_cast<std::size_t>(position); }

}  // namespace

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
  if (!extras_ || !extras_->fingerprint) return fmt::format("{:016x}", digest_of(tensor));
  // What the user's function saves is none of the region's.
  const detail::NoScopes no_scopes;
  const seam::OperatorsUnseen unseen;
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
  for (const Slot& slot : slots_) met.add(slot.description.device());
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

int64_t Frame::add_slot(const at::Tensor& saved) {
  const at::Tensor* const origin = take_input_being_saved();
  const at::Tensor& judged = origin != nullptr ? *origin : saved;
  if (recorded_ != nullptr && is_recording())
    recording::slot_event(EventKind::Pack, *this, static_cast<int64_t>(slots_.size()),
                          Description(saved, false).text());
  Slot slot;
  slot.description = Description(saved, options_.determinism_check >= DeterminismCheck::Layout);
  slot.provenance = provenance_of(judged, start_, inputs_.storages());
  slot.group = at::sequence_number::peek();
  slot.requires_grad = judged.requires_grad();
  slot.has_edge = has_raw_gradient_edge(judged);
  slot.is_inner_input = origin != nullptr;
  slot.saves_own_output = !slot.is_inner_input && is_made_by_function(saved);
  // What a region around keeps may be captured here: its recompute must have the data, and no shell.
  if (sees_operators_ && depth_ > 1)
    detail::visit(detail::Ability::Region, [&](detail::Scope& scope) {
      if (scope.frame() != this && scope.selection() != nullptr)
        scope.selection()->note_saved(saved);
    });
  const bool is_compared = compares_contents() || (saved.is_cpu() && has_new_drawer());
  if (!pending_.empty()) hash_pending(slot.group, /*is_end=*/origin != nullptr);

  std::lock_guard<SpinLock> lock(mutex_);
  REMAT_INVARIANT(!is_settled_, "frame {} got a slot after its function had returned", id_);
  const auto position = static_cast<int64_t>(slots_.size());
  if (slots_.size() == slots_.capacity())
    slots_.reserve(slots_.empty() ? expected_slots : 2 * slots_.size());
  slots_.push_back(std::move(slot));
  Slot& latest = slots_.back();
  latest.follows = !std::exchange(is_group_broken_, false) && slots_.size() > 1 &&
                   slots_[slots_.size() - 2].is_same_operator(latest);
  if (latest.follows && slots_[slots_.size() - 2].saves_own_output)
    latest.saves_own_output = true;
  else if (latest.saves_own_output)
    for (auto each = slots_.rbegin() + 1; each != slots_.rend() && each->is_same_operator(latest);
         ++each)
      each->saves_own_output = true;
  if (options_.debug) extras_->saved_by.push_back(extras_->forward_log.size() - 1);
  if (is_compared) pending_.emplace_back(position, saved.detach());
  if (selection_ != nullptr) selection_->note_saved(saved, position);
  return position;
}

// An operator may fill a tensor after it was saved, so its contents are taken when the next
// operator saves something, or when the function has returned.
void Frame::hash_pending(uint64_t next_group, bool is_end) {
  if (!is_end && slots_[at_position(pending_.front().first)].group == next_group) return;
  for (auto& [position, tensor] : std::exchange(pending_, {})) {
    std::string contents = contents_of(tensor);
    std::lock_guard<SpinLock> lock(mutex_);
    if (contents_.size() <= at_position(position)) contents_.resize(at_position(position) + 1);
    contents_[at_position(position)] = std::move(contents);
  }
}

std::optional<std::string> Frame::expected_contents(int64_t position) const {
  const auto index = at_position(position);
  return index < contents_.size() ? contents_[index] : std::nullopt;
}

void Frame::settle(c10::function_ref<void(detail::TensorVisitor)> visit_result) {
  if (!pending_.empty()) hash_pending(0, /*is_end=*/true);
  StorageSet results;
  int64_t tail_elements = 0;
  visit_result([&](at::Tensor& tensor) {
    if (!tensor.defined()) return;
    results.add(tensor);
    if (!tensor.is_nested()) tail_elements = std::max(tail_elements, tensor.numel());
  });
  if (options_.preserve_rng_state) draws_.settle();
  if (user_state_)
    for (const auto& log : user_state_->draw_logs()) log->settle();
  if (device_rng_) {
    DevicesMet met = devices_met();
    visit_result([&](at::Tensor& tensor) { met.add(tensor); });
    device_rng_->settle(met);
  }
  if (device_rng_ && device_rng_->is_empty()) device_rng_.reset();

  if (selection_ != nullptr) selection_->end_naming();
  recording::RegionSums recorded;
  if (recorded_ != nullptr) recorded = sums(results);
  settle(results, tail_elements);
  if (recorded_ == nullptr) return;
  if (selection_ != nullptr) selection_->add_to(recorded);
  recording::region_ends(*this, *recorded_, recorded);
}

void Frame::settle(const StorageSet& results, int64_t tail_elements) {
  std::lock_guard<SpinLock> lock(mutex_);
  is_settled_ = true;
  count(live_counters.tensors_dropped, static_cast<int64_t>(slots_.size()));
  expected_slots = std::clamp<std::size_t>(slots_.size(), 1, 64);
  // What doubling holds in reserve, but for a few slots: not worth a move in small regions.
  if (slots_.capacity() > slots_.size() + slots_.size() / 8 + 4) slots_.shrink_to_fit();
  settle_provenance(results);
  settle_operators();
  inputs_.settle();
  if (selection_ != nullptr) selection_->settle();
  if (slots_.empty() || at::sequence_number::peek() != slots_.back().group) return;
  for (auto slot = slots_.rbegin(); slot != slots_.rend() && slot->group == slots_.back().group;
       ++slot)
    tail_elements = std::max(tail_elements, slot->description.numel());
  // Under a policy the end of a region is what the policy was told that it is.
  ends_small_ = tail_elements <= max_small_tail && selection_ == nullptr;
}

// Before the storages of what was dropped are forgotten. What an input or a parameter holds was not
// dropped: it is there all the same.
recording::RegionSums Frame::sums(const StorageSet& results) const {
  recording::RegionSums all;
  all.num_slots = static_cast<int64_t>(slots_.size());
  std::map<const c10::StorageImpl*, int64_t> dropped;
  for (const Slot& slot : slots_) {
    const Provenance& provenance = slot.provenance;
    const auto* const storage = provenance.storage._unsafe_get_target();
    if (provenance.origin == Origin::Leaf && storage != nullptr && !provenance.storage.expired())
      all.parameters.emplace_back(storage, static_cast<int64_t>(storage->nbytes()));
    if (provenance.origin != Origin::Inside && provenance.origin != Origin::Outside) continue;
    const bool is_captured = provenance.origin == Origin::Outside && storage != nullptr &&
                             !provenance.storage.expired() && !results.contains(storage);
    if (is_captured) continue;
    if (storage == nullptr) {  // made inside, of which no storage is remembered
      all.dropped_bytes += slot.description.num_bytes();
      continue;
    }
    int64_t& bytes = dropped[storage];
    bytes = std::max(bytes, slot.description.num_bytes());
  }
  for (const auto& [storage, bytes] : dropped) all.dropped_bytes += bytes;
  return all;
}

void Frame::tell_recorders_of_throw() const {
  if (recorded_ != nullptr) recording::region_throws(*this, *recorded_);
}

void Frame::settle_provenance(const StorageSet& results) {
  for (Slot& slot : slots_) {
    Provenance& provenance = slot.provenance;
    if (provenance.origin == Origin::Leaf || provenance.origin == Origin::Input) continue;
    c10::StorageImpl* const storage = provenance.storage._unsafe_get_target();
    if (storage == nullptr) continue;
    const bool is_gone = provenance.storage.expired();
    // What a region keeps comes back as it is, or, from the CPU or a hook, as another tensor.
    const bool is_kept = selection_ != nullptr && selection_->keeps(storage);
    if (is_gone || is_kept || results.contains(storage)) {
      provenance.origin = Origin::Inside;
      if (is_gone) provenance.storage.reset();
    }
  }
}

// Rule 5: generated code saves the mutable buffer of an operator (`noise` of rrelu) before the
// kernel fills it. Such a buffer does not require grad and was made inside the region.
void Frame::settle_operators() {
  for (auto first = slots_.begin(); first != slots_.end();) {
    const auto last = std::find_if(first, slots_.end(), [&](const Slot& slot) {
      return &slot != &*first && !slot.is_same_operator(*first);
    });
    const bool may_be_unwritten = std::any_of(first, last, [](const Slot& slot) {
      const Origin origin = slot.provenance.origin;
      return !slot.is_inner_input && !slot.requires_grad &&
             (origin == Origin::Inside || origin == Origin::NoStorage);
    });
    for (; first != last; ++first) first->finish_operator = may_be_unwritten;
  }
}

void Frame::owner_waits_for_backward(Run& run) {
  std::lock_guard<SpinLock> lock(mutex_);
  run.waits_for_backward = true;
  run.tell_change();
}

void Frame::break_group() {
  std::lock_guard<SpinLock> lock(mutex_);
  is_group_broken_ = true;
}

void Frame::note_backward(int64_t number, InnerBackwards::Asked asked) {
  std::lock_guard<SpinLock> lock(mutex_);
  if (inner_backwards_ == nullptr) inner_backwards_ = std::make_unique<InnerBackwards>();
  inner_backwards_->note(number, std::move(asked));
}

InnerBackwards::Asked Frame::asked_by_backward(int64_t number) {
  std::lock_guard<SpinLock> lock(mutex_);
  return inner_backwards_ == nullptr ? InnerBackwards::Asked{} : inner_backwards_->asked(number);
}

bool Frame::has_noted_backwards() {
  std::lock_guard<SpinLock> lock(mutex_);
  return inner_backwards_ != nullptr;
}

Frame::SlotView Frame::view_for(int64_t only_position) {
  std::lock_guard<SpinLock> lock(mutex_);
  SlotView view;
  view.is_settled = is_settled_;
  view.is_needed.resize(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    view.has_own_output |= slots_[i].saves_own_output;
    if (only_position >= 0 ? position != only_position : !slots_[i].is_alive) continue;
    view.is_needed[i] = 1;
    view.last_needed = position;
    ++view.num_needed;
  }
  view.ends_small = ends_small_ && view.last_needed + 1 == static_cast<int64_t>(slots_.size());
  return view;
}

void Frame::drop_slot(int64_t position) noexcept {
  // Tensors die outside the lock: in a Python process that may wait for the interpreter's lock.
  c10::SmallVector<Value, 1> dying;
  std::lock_guard<SpinLock> lock(mutex_);
  slots_[at_position(position)].is_alive = false;
  for (const auto& run : runs_)  // what is being filled is dropped when the task ends
    if (run->state == Run::State::Done && run->has(position)) dying.push_back(run->take(position));
}

HeldInfo Frame::describe_slot(int64_t position) {
  std::lock_guard<SpinLock> lock(mutex_);
  const Description& description = slots_[at_position(position)].description;
  return {.sizes = description.sizes(),
          .dtype = description.dtype(),
          .bytes = description.num_bytes(),
          .region = name(),
          .dropped = true};
}

void Frame::end_task(const TaskKey& task) noexcept {
  if (is_planted(Fault::TaskEnd)) return;
  std::shared_ptr<Run> ended;
  std::lock_guard<SpinLock> lock(mutex_);
  const auto found =
      std::find_if(runs_.begin(), runs_.end(), [&](const auto& run) { return run->task == task; });
  if (found == runs_.end()) return;
  ended = std::move(*found);
  runs_.erase(found);
}

at::Tensor Frame::read_alone(int64_t position) {
  Run run(TaskKey{});
  recompute(c10::intrusive_ptr<Frame>::reclaim_copy(this), run, position);
  return hand_over(*this, position, run.take(position));
}

// Rule 4: unpacked is released, except that a cache keeps the value for the next backward.
Value Frame::take_or_copy(Run& run, int64_t position, const Task& task) {
  const bool is_cached = run.task.kind == TaskKey::Kind::Cache;
  if (options_.strict_unpack || run.task.kind == TaskKey::Kind::Group) {
    run.handed_to.resize(slots_.size(), -1);
    run.handed_to[at_position(position)] = task.graph.id;
  }
  return is_cached ? run.peek(position) : run.take(position);
}

// A value was kept for another backward. Its captures and inputs must be as they were when it was
// computed; otherwise the recompute that follows says what is wrong with them.
bool Frame::is_fresh(const Run& run) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    if (run.has(position)) {
      const Value& value = run.peek(position);
      if (static_cast<uint32_t>(value.tensor._version()) != value.version) return false;
    }
    if (options_.capture_check == CaptureCheck::Raise && is_leaf_changed(slots_[i].provenance))
      return false;
  }
  return true;
}

at::Tensor Frame::read_slot(int64_t position) {
  const std::optional<Task> task = current_task();
  if (!task) return read_alone(position);

  const auto self = c10::intrusive_ptr<Frame>::reclaim_copy(this);
  const auto index = at_position(position);
  TaskKey key = task->shared ? task->shared->key() : task->graph;
  std::unique_lock<SpinLock> lock(mutex_);
  std::shared_ptr<Run> run, stale;
  const auto take_and_unlock = [&] {
    Value value = take_or_copy(*run, position, *task);
    lock.unlock();
    return hand_over(*this, position, std::move(value));
  };
  for (;;) {
    auto found = std::find_if(runs_.begin(), runs_.end(), [&](const auto& each) {
      return each->task == key || (each->task == task->graph && each->state == Run::State::Done);
    });
    if (found == runs_.end()) {
      run = std::make_shared<Run>(key);
      runs_.push_back(run);
      break;
    }
    run = *found;
    if (run->state == Run::State::Running) {
      if (run->owner == std::this_thread::get_id() || run->waits_for_backward) {
        lock.unlock();
        return read_alone(position);
      }
      run->wait_for_change(lock);
      continue;
    }
    const int64_t read_by = index < run->handed_to.size() ? run->handed_to[index] : -1;
    if (options_.strict_unpack && read_by == task->graph.id) throw_double_unpack(*this, position);
    if (run->task.kind == TaskKey::Kind::Group && read_by >= 0 && read_by != task->graph.id)
      throw_group_overlap(*this, position);
    if (run->graph_task != task->graph.id && !is_fresh(*run)) {
      stale = std::move(*found);  // dies without the lock
      runs_.erase(found);
      continue;
    }
    run->graph_task = task->graph.id;
    if (run->has(position)) {
      if (run->task.kind == TaskKey::Kind::Cache) {
        const Value value = take_or_copy(*run, position, *task);
        lock.unlock();
        task->shared->touch(*this);
        return hand_over(*this, position, value);
      }
      return take_and_unlock();
    }
    run->state = Run::State::Running;
    run->owner = std::this_thread::get_id();
    break;
  }

  // This thread recomputes; the others of the task wait (Rule 7).
  lock.unlock();
  stale.reset();
  try {
    if (task->shared == nullptr) notify_at_task_end(task->graph, self);
    recompute(self, *run);
    if (task->shared != nullptr && !task->shared->add(self, run->num_bytes())) {
      // Too large for the cache: kept as without one, until this backward has read it.
      notify_at_task_end(task->graph, self);
      key = task->graph;
    }
  } catch (...) {
    lock.lock();
    runs_.erase(std::remove(runs_.begin(), runs_.end(), run), runs_.end());
    run->state = Run::State::Done;
    run->tell_change();
    throw;
  }
  lock.lock();
  run->task = key;
  run->graph_task = task->graph.id;
  run->state = Run::State::Done;
  run->tell_change();
  REMAT_INVARIANT(run->has(position), "frame {}: slot {} stayed empty", id_, position);
  return take_and_unlock();
}

}  // namespace remat
