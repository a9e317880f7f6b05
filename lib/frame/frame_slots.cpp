// Frame in forward: a slot for each tensor that autograd saves, and what is known of them all once the
// function has returned.

#include <ATen/SequenceNumber.h>

#include <algorithm>
#include <map>
#include <utility>

#include "lib/base/counters.h"
#include "lib/base/invariant.h"
#include "lib/frame/frame.h"
#include "lib/selective/selection.h"

namespace remat {

namespace {

/// A tail that writes at most this many elements costs less than the throw that would skip it.
constexpr int64_t max_small_tail = 4096;

/// The number of slots of the frame that this thread settled last: regions repeat.
thread_local std::size_t expected_slots = 4;

}  // namespace

int64_t Frame::add_slot(const at::Tensor& saved) {
  const at::Tensor* const origin = take_input_being_saved();
  const at::Tensor& judged = origin != nullptr ? *origin : saved;
  if (recorded_ != nullptr && is_recording())
    recording::slot_event(EventKind::Pack, *this, static_cast<int64_t>(slots_.size()),
                          TensorMetadata(saved, false).text());
  Slot slot;
  slot.metadata = TensorMetadata(saved, options_.determinism_check >= DeterminismCheck::Layout);
  slot.provenance = provenance_of(judged, start_, inputs_.storages());
  slot.operator_number = at::sequence_number::peek();
  slot.requires_grad = judged.requires_grad();
  slot.has_edge = has_raw_gradient_edge(judged);
  slot.is_inner_input = origin != nullptr;
  slot.saves_own_output = !slot.is_inner_input && is_made_by_function(saved);
  // What a region around keeps may be captured here: its recompute must have the data, and no placeholder.
  if (sees_operators_ && depth_ > 1)
    detail::visit(detail::Ability::Region, [&](detail::Scope& scope) {
      if (scope.frame() != this && scope.selection() != nullptr)
        scope.selection()->note_saved(saved);
    });
  const bool is_compared = compares_contents() || (saved.is_cpu() && has_new_drawer());
  if (!pending_.empty()) hash_pending(slot.operator_number, /*is_end=*/origin != nullptr);

  std::lock_guard<SpinLock> lock(mutex_);
  REMAT_INVARIANT(!is_settled_, "frame {} got a slot after its function had returned", id_);
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
  if (options_.debug) extras_->saved_by.push_back(extras_->forward_log.size() - 1);
  if (is_compared) pending_.emplace_back(position, saved.detach());
  if (selection_ != nullptr) selection_->note_saved(saved, position);
  return position;
}

// An operator may fill a tensor after it was saved, so its contents are taken when the next
// operator saves something, or when the function has returned.
void Frame::hash_pending(uint64_t next_operator, bool is_end) {
  if (!is_end && slots_[at_position(pending_.front().first)].operator_number == next_operator)
    return;
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
  std::vector<torch::autograd::SavedVariable> lost;  // die without the lock
  std::lock_guard<SpinLock> lock(mutex_);
  is_settled_ = true;
  count(live_counters.tensors_dropped, static_cast<int64_t>(slots_.size()));
  expected_slots = std::clamp<std::size_t>(slots_.size(), 1, 64);
  // What doubling holds in reserve, but for a few slots: not worth a move in small regions.
  if (slots_.capacity() > slots_.size() + slots_.size() / 8 + 4) slots_.shrink_to_fit();
  settle_provenance(results);
  settle_operators();
  lost = inputs_.settle();
  if (selection_ != nullptr) selection_->settle();
  if (slots_.empty() || at::sequence_number::peek() != slots_.back().operator_number) return;
  for (auto slot = slots_.rbegin();
       slot != slots_.rend() && slot->operator_number == slots_.back().operator_number; ++slot)
    tail_elements = std::max(tail_elements, slot->metadata.numel());
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
      all.dropped_bytes += slot.metadata.num_bytes();
      continue;
    }
    int64_t& bytes = dropped[storage];
    bytes = std::max(bytes, slot.metadata.num_bytes());
  }
  for (const auto& [storage, bytes] : dropped) all.dropped_bytes += bytes;
  return all;
}

void Frame::tell_recorders_of_throw() const {
  if (recorded_ != nullptr) recording::region_throws(*this, *recorded_);
}

void Frame::settle_provenance(const StorageSet& results) {
  may_meet_outside_ = inputs_.has_leaf();
  for (Slot& slot : slots_) {
    Provenance& provenance = slot.provenance;
    may_meet_outside_ |= provenance.origin == Origin::Leaf || provenance.origin == Origin::Outside;
    if (provenance.origin == Origin::Leaf || provenance.origin == Origin::Input) continue;
    c10::StorageImpl* const storage = provenance.storage._unsafe_get_target();
    if (storage == nullptr) continue;
    const bool is_gone = provenance.storage.expired();
    // What a region keeps comes back as it is, or, from the CPU or a hook, as another tensor.
    const bool is_kept = selection_ != nullptr && selection_->keeps(storage);
    if (is_gone || is_kept || results.contains(storage)) {
      provenance.origin = Origin::Inside;
      provenance.leaf.reset();
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

}  // namespace remat
