#include "lib/frame/slots.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lib/base/counters.h"
#include "lib/base/invariant.h"
#include "lib/tensor/content_hash.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

namespace {

/// A tail that writes at most this many elements costs less than the throw that would skip it.
constexpr int64_t max_small_tail = 4096;

/// The number of slots of the region that this thread settled last, as a guess for the next one.
thread_local std::size_t expected_slots = 4;

}  // namespace

void* Slots::room_for_hook() {
  const std::size_t expected = expected_slots;
  std::lock_guard<SpinLock> lock(mutex_);
  return hooks_.room(expected);
}

int64_t Slots::add(const Region& region, const at::Tensor& saved, const at::Tensor* origin,
                   const RegionStart& start, const StorageSet& inputs, bool is_hashed) {
  const at::Tensor& judged = origin != nullptr ? *origin : saved;
  Slot slot;
  slot.metadata =
      TensorMetadata(saved, region.options.determinism_check >= DeterminismCheck::Layout);
  slot.provenance = provenance_of(judged, start, inputs);
  slot.operator_number = at::sequence_number::peek();
  slot.requires_grad = judged.requires_grad();
  slot.has_edge = has_raw_gradient_edge(judged);
  slot.is_inner_input = origin != nullptr;
  slot.is_older =
      slot.has_edge && slot.provenance.origin == Origin::Outside && is_built_before(start, judged);
  slot.saves_own_output = !slot.is_inner_input && is_made_by_function(saved);
  if (has_contents_.load(std::memory_order_acquire))
    note_pending(region, slot.operator_number, /*is_end=*/origin != nullptr);
  const int64_t position = push(std::move(slot), region);
  if (is_hashed || region.check() != nullptr) add_pending(position, saved);
  if (origin != nullptr) note_rest(region);
  return position;
}

int64_t Slots::push(Slot&& slot, const Region& region) {
  std::lock_guard<SpinLock> lock(mutex_);
  REMAT_INVARIANT(!is_settled_, "frame {} got a slot after its function had returned",
                  region.info.id);
  const auto position = static_cast<int64_t>(slots_.size());
  if (slots_.size() == slots_.capacity())
    slots_.reserve(slots_.empty() ? expected_slots : 2 * slots_.size());
  slots_.push_back(std::move(slot));
  Slot& latest = slots_.back();
  latest.follows = !std::exchange(is_operator_over_, false) && slots_.size() > 1 &&
                   slots_[slots_.size() - 2].is_same_operator(latest);
  if (latest.follows && slots_[slots_.size() - 2].saves_own_output)
    latest.saves_own_output = true;
  else if (latest.saves_own_output)
    for (auto each = slots_.rbegin() + 1; each != slots_.rend() && each->is_same_operator(latest);
         ++each)
      each->saves_own_output = true;
  return position;
}

void Slots::add_pending(int64_t position, const at::Tensor& saved) {
  Pending pending{position, saved.detach(), static_cast<uint32_t>(saved._version())};
  std::lock_guard<SpinLock> lock(mutex_);
  if (contents_ == nullptr) {
    contents_ = std::make_unique<Contents>();
    has_contents_.store(true, std::memory_order_release);
  }
  contents_->pending.push_back(std::move(pending));
}

void Slots::end_operator(const Region& region) {
  note_rest(region);
  std::lock_guard<SpinLock> lock(mutex_);
  is_operator_over_ = true;
}

// An operator may fill a tensor after it was saved. So contents are noted when the next operator
// saves a tensor, or when the function has returned. An argument of a region inside is complete,
// and noted at once. A tensor changed in place by then is not compared, since a recompute may look
// earlier.
void Slots::note_pending(const Region& region, uint64_t next_operator, bool is_end) {
  std::vector<Pending> due;
  {
    std::lock_guard<SpinLock> lock(mutex_);
    const auto& pending = contents_->pending;
    if (pending.empty() ||
        (!is_end && slots_[at_position(pending.front().position)].operator_number == next_operator))
      return;
    due.swap(contents_->pending);
  }
  for (const auto& [position, tensor, version] : due) {
    if (static_cast<uint32_t>(tensor._version()) != version) continue;
    const TensorCheck* const check = region.check();
    std::string note = check == nullptr ? text_of_contents(tensor) : check->note(tensor);
    std::lock_guard<SpinLock> lock(mutex_);
    contents_->notes.emplace_back(position, std::move(note));
  }
}

void Slots::note_rest(const Region& region) {
  if (has_contents_.load(std::memory_order_acquire)) note_pending(region, 0, /*is_end=*/true);
}

const std::string* Slots::note_of(int64_t position) const {
  if (contents_ == nullptr) return nullptr;
  const auto& notes = contents_->notes;
  const auto found =
      std::lower_bound(notes.begin(), notes.end(), position,
                       [](const auto& note, int64_t wanted) { return note.first < wanted; });
  return found == notes.end() || found->first != position ? nullptr : &found->second;
}

void Slots::settle(const Ending& ending, c10::function_ref<bool(const c10::StorageImpl*)> is_kept,
                   StorageVisitor saw_statistics) {
  std::lock_guard<SpinLock> lock(mutex_);
  is_settled_ = true;
  count(live_counters.tensors_dropped, static_cast<int64_t>(slots_.size()));
  expected_slots = std::clamp<std::size_t>(slots_.size(), 1, 64);
  // Releases the reserve of the doubling, except a few slots: in small regions that is not worth a
  // move.
  if (slots_.capacity() > slots_.size() + slots_.size() / 8 + 4) slots_.shrink_to_fit();
  settle_provenance(ending, is_kept);
  settle_operators(saw_statistics);
  if (slots_.empty()) return;
  const uint64_t last_operator = slots_.back().operator_number;
  last_is_small_ = true;
  for (auto slot = slots_.rbegin();
       slot != slots_.rend() && slot->operator_number == last_operator && last_is_small_; ++slot)
    last_is_small_ = slot->metadata.numel() <= max_small_tail;
  ends_small_ = last_is_small_ && ending.max_result_elements <= max_small_tail &&
                ending.may_end_small && at::sequence_number::peek() == last_operator;
}

void Slots::settle_provenance(const Ending& ending,
                              c10::function_ref<bool(const c10::StorageImpl*)> is_kept) {
  may_meet_outside_ = ending.has_leaf_inputs;
  for (Slot& slot : slots_) {
    Provenance& provenance = slot.provenance;
    may_meet_outside_ |= provenance.origin == Origin::Leaf || provenance.origin == Origin::Outside;
    if (provenance.origin == Origin::Leaf || provenance.origin == Origin::Input) continue;
    c10::StorageImpl* const storage = provenance.storage._unsafe_get_target();
    if (storage == nullptr) continue;
    const bool is_gone = provenance.storage.expired();
    const bool is_kept_here = is_kept(storage);
    // If the function ran a backward, an older graph's saved tensors that it read look older than
    // they are.
    if (slot.is_older && !is_kept_here && !ending.has_run_backward) continue;
    // A kept tensor is returned as it is, or as another tensor if it was on the CPU or in a hook.
    if (is_gone || is_kept_here || ending.results.contains(storage)) {
      provenance.origin = Origin::Inside;
      provenance.leaf.reset();
      if (is_gone) provenance.storage.reset();
    }
  }
}

namespace {

/// A batch norm in training mode saves, in this order, its normalized input, the two running
/// statistics (arguments or captures), maybe its weight, and the mean and deviation of the batch.
/// In eval mode the last two are empty; no other operator of LibTorch saves such four. No policy
/// keeps its results, so each recompute runs it.
///
/// An instance norm with running statistics calls it on its input laid out as one sample, with
/// copies of the statistics for each sample and channel, and writes their means back. The visitor
/// then gets null, which stands for unknown buffers.
template <class Visitor>
void visit_running_statistics(const Slot* first, const Slot* last, Visitor&& visitor) {
  const auto sizes = first->metadata.sizes();
  if (sizes.size() < 2) return;
  const auto is_for_channels = [&](const Slot& slot) {
    return !slot.requires_grad && slot.metadata.dim() == 1 && slot.metadata.numel() == sizes[1];
  };
  const Slot* given[2] = {};
  std::ptrdiff_t num_given = 0, num_made = 0;
  for (const Slot* slot = first; slot != last; ++slot) {
    if (!is_for_channels(*slot)) continue;
    const Origin origin = slot->provenance.origin;
    if (origin == Origin::Inside)
      ++num_made;
    else if ((origin == Origin::Outside || origin == Origin::Input) && num_given < 2)
      given[num_given++] = slot;
  }
  constexpr std::ptrdiff_t num_statistics = 2, num_moments = 2;
  if (num_given == 0 && sizes.size() >= 3 && sizes[0] == 1 &&
      num_made >= num_statistics + num_moments)
    visitor(nullptr);
  if (num_given < num_statistics || num_made < num_moments) return;
  for (const Slot* slot : given) visitor(slot->provenance.storage._unsafe_get_target());
}

/// A batch norm saves five tensors at least.
constexpr std::ptrdiff_t min_saved_by_batch_norm = 5;

}  // namespace

// Rule 5: generated code saves the mutable buffer of an operator (`noise` of rrelu) before the
// kernel fills it. Such a buffer does not require grad and was made inside the region.
void Slots::settle_operators(StorageVisitor saw_statistics) {
  for (auto first = slots_.begin(); first != slots_.end();) {
    const auto last = std::find_if(first, slots_.end(), [&](const Slot& slot) {
      return &slot != &*first && !slot.is_same_operator(*first);
    });
    const bool may_be_unwritten = std::any_of(first, last, [](const Slot& slot) {
      const Origin origin = slot.provenance.origin;
      return !slot.is_inner_input && !slot.requires_grad &&
             (origin == Origin::Inside || origin == Origin::NoStorage);
    });
    if (last - first >= min_saved_by_batch_norm)
      visit_running_statistics(&*first, &*first + (last - first), saw_statistics);
    for (; first != last; ++first) first->finish_operator = may_be_unwritten;
  }
}

// Runs before the storages of dropped tensors are forgotten. Data held by an input or a parameter
// were not dropped.
recording::RegionSums Slots::sums(const StorageSet& results) {
  recording::RegionSums all;
  all.num_slots = static_cast<int64_t>(slots_.size());
  std::map<const c10::StorageImpl*, int64_t> dropped;
  for (const Slot& slot : slots_) {
    const Provenance& provenance = slot.provenance;
    const auto* const storage = provenance.storage._unsafe_get_target();
    if (provenance.origin == Origin::Leaf && storage != nullptr && !provenance.storage.expired())
      all.parameters.push_back(
          {storage, storage->device(), static_cast<int64_t>(storage->nbytes())});
    if (provenance.origin != Origin::Inside && provenance.origin != Origin::Outside) continue;
    const bool is_captured = provenance.origin == Origin::Outside && storage != nullptr &&
                             !provenance.storage.expired() && !results.contains(storage);
    if (is_captured) continue;
    if (storage == nullptr) {  // made inside, with no storage remembered
      all.dropped_bytes += slot.metadata.num_bytes();
      continue;
    }
    int64_t& bytes = dropped[storage];
    bytes = std::max(bytes, slot.metadata.num_bytes());
  }
  for (const auto& [storage, bytes] : dropped) all.dropped_bytes += bytes;
  return all;
}

void Slots::drop(int64_t position) noexcept {
  std::lock_guard<SpinLock> lock(mutex_);
  slots_[at_position(position)].is_alive = false;
}

HeldInfo Slots::describe(int64_t position, const Region& region) const {
  std::lock_guard<SpinLock> lock(mutex_);
  const TensorMetadata& metadata = slots_[at_position(position)].metadata;
  return {.sizes = metadata.sizes(),
          .dtype = metadata.dtype(),
          .bytes = metadata.num_bytes(),
          .region = region.info.name(),
          .dropped = true};
}

SlotView Slots::view_for(int64_t only_position) const {
  std::lock_guard<SpinLock> lock(mutex_);
  SlotView view;
  view.is_settled = is_settled_;
  view.is_needed.resize(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto position = static_cast<int64_t>(i);
    if (only_position >= 0 ? position != only_position : !slots_[i].is_alive) continue;
    view.is_needed[i] = 1;
    view.last_needed = position;
    ++view.num_needed;
  }
  const bool needs_last = view.last_needed + 1 == static_cast<int64_t>(slots_.size());
  view.ends_small = ends_small_ && needs_last;
  view.last_is_small = last_is_small_ && needs_last;
  return view;
}

bool Slots::is_any_leaf_changed() const {
  std::lock_guard<SpinLock> lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return is_leaf_changed(slot.provenance); });
}

bool Slots::has_slot_of(const c10::StorageImpl* storage) const {
  std::lock_guard<SpinLock> lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(), [storage](const Slot& slot) {
    return slot.provenance.storage._unsafe_get_target() == storage;
  });
}

at::Tensor Slots::captured_at(const void* address) const {
  std::lock_guard<SpinLock> lock(mutex_);
  const auto found = std::find_if(slots_.begin(), slots_.end(), [address](const Slot& slot) {
    return slot.provenance.origin == Origin::Outside &&
           slot.provenance.leaf._unsafe_get_target() == address;
  });
  return found == slots_.end() ? at::Tensor() : at::Tensor(found->provenance.leaf.lock());
}

void Slots::add_devices(DevicesMet& met) const {
  std::lock_guard<SpinLock> lock(mutex_);
  for (const Slot& slot : slots_) met.add(slot.metadata.device());
}

void Slots::visit_outside(c10::function_ref<void(at::Tensor)> visitor) const {
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

void Slots::clear() {
  if (!is_settled_) count(live_counters.tensors_dropped, static_cast<int64_t>(slots_.size()));
  std::vector<Slot>().swap(slots_);
  hooks_.clear();
  contents_.reset();
}

}  // namespace remat
