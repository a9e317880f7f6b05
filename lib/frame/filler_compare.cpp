// Filler: compares a saved tensor with forward's.

#include "lib/frame/filler.h"

#include <ATen/SequenceNumber.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "lib/base/planted_fault.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/engine.h"
#include "lib/tensor/content_hash.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

// Note [Another tensor in its place]
// A flag of a captured tensor, `requires_grad` above all, decides which tensors an operator saves.
// If it has changed since forward, the recompute saves one more or one less, and all later tensors
// reach the wrong slots. Shapes may agree. So a tensor must also require grad as forward's did,
// unless it is the same tensor or the cast of a leaf that changed likewise. It must also begin or
// continue the tensors of one operator as forward's did.
static bool is_same_kind(const Slot& slot, const at::Tensor& judged) {
  const bool has_edge = has_raw_gradient_edge(judged);
  if (slot.has_edge == has_edge) return true;
  const Provenance& then = slot.provenance;
  if (then.storage._unsafe_get_target() != nullptr &&
      then.storage._unsafe_get_target() == known_storage_of(judged))
    return true;
  if (then.origin != Origin::Leaf) return false;
  const auto leaf = then.leaf.lock();
  return leaf && at::Tensor(leaf).requires_grad() == has_edge;
}

static bool is_object(const at::Tensor* tensor, const WeakTensor& object) {
  return (tensor == nullptr ? nullptr : tensor->unsafeGetTensorImpl()) ==
         object._unsafe_get_target();
}

// Another leaf in the place of a leaf may have been made inside. A result that existed before the
// recompute was not made inside, and forward had a leaf: the captured variable has been assigned
// another tensor since, as fast weights are.
bool Filler::is_older_result(const Slot& slot, const at::Tensor& judged) const {
  const Provenance& then = slot.provenance;
  if (then.origin != Origin::Leaf || then.leaf.expired() || std::this_thread::get_id() != owner_)
    return false;
  const at::Tensor& root = seam::viewed(judged);
  return seam::node_of(root) != nullptr && !is_built_since(start_, root) &&
         !is_object(leaf_behind(judged), then.leaf) &&
         inputs_with(known_storage_of(judged)).empty();
}

// Note [Another leaf]
// Where forward saved a leaf that requires grad, the recompute may save another one. The function
// may make a leaf in each of its runs (`z = x.detach().requires_grad_()`). Or it may read a
// variable that was given another leaf since: a replaced parameter, or one that stood in for a
// module's own around forward. Forward's leaf lives as long as its graph, so contents decide: a
// function that computes the same makes equal leaves. If forward's leaf has been changed since,
// there is nothing to compare with.
static bool is_other_leaf(const Provenance& then, const at::Tensor& judged) {
  if (then.origin != Origin::Leaf || is_planted(Fault::CaptureCheck)) return false;
  const at::Tensor* const leaf = leaf_behind(judged);
  if (leaf == nullptr || is_object(leaf, then.leaf) || is_leaf_changed(then)) return false;
  const auto leaf_then = then.leaf.lock();
  if (!leaf_then) return false;
  const at::Tensor before(leaf_then);
  const at::Tensor& now = *leaf;
  const auto can_be_compared = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.is_nested() && !has_no_memory(tensor) &&
           storage_of(tensor) != nullptr && (tensor.numel() == 0 || tensor.storage().nbytes() > 0);
  };
  if (!can_be_compared(before) || !can_be_compared(now) ||
      before.scalar_type() != now.scalar_type() || before.device() != now.device() ||
      before.sizes() != now.sizes() || before.strides() != now.strides())
    return false;
  const bool is_same_memory = storage_of(before)->data() == storage_of(now)->data() &&
                              before.storage_offset() == now.storage_offset();
  return !is_same_memory && content_hash(before) != content_hash(now);
}

bool Filler::is_changed_capture(const Slot& slot, const at::Tensor& judged) const {
  if (region_.options.capture_check != CaptureCheck::Raise || !view_.is_settled) return false;
  if (is_older_result(slot, judged)) return true;
  if (is_other_leaf(slot.provenance,
                    judged))  // hooks may give back a different argument
    return !is_vouched(judged) &&
           (replay_ == nullptr || !replay_->is_copy(known_storage_of(judged))) &&
           inputs_with(known_storage_of(judged)).empty();
  if (!is_changed(slot.provenance, judged)) return false;
  if (is_vouched(judged) &&
      slot.provenance.storage._unsafe_get_target() == known_storage_of(judged))
    return false;
  if (slot.provenance.origin != Origin::Input) return true;
  // An argument itself is checked when it is unpacked, and a kept alias of it when it is handed
  // over. Hooks may give back copies of both, or restore the argument in its own storage. A
  // captured alias with a version counter of its own is checked only here.
  const bool is_replaced_by_copy = is_replaced(slot.provenance, judged);
  if (is_replaced_by_copy && replay_ != nullptr && replay_->is_copy(known_storage_of(judged)))
    return false;
  const c10::VariableVersion& counter = judged.unsafeGetTensorImpl()->version_counter();
  const auto given = inputs_with(known_storage_of(judged));
  return std::none_of(given.begin(), given.end(), [&](const GivenInput& each) {
    return is_replaced_by_copy || seam::is_same_counter(each.counter, counter);
  });
}

Difference Filler::difference(int64_t position, const Slot& slot, const at::Tensor& judged,
                              std::string forward, std::string now) const {
  CheckpointError::Mismatch m{position, std::move(forward), std::move(now), {}, {}};
  if (log_) {
    const RegionExtras& extras = *region_.extras;
    m.forward_op = extras.forward_log.at(extras.saved_by.at(at_position(position)));
  }
  return Difference{std::move(m), SlotIdentity(slot), TensorIdentity::of(judged)};
}

void Filler::compare(int64_t position, const Slot& slot, const at::Tensor& saved,
                     const at::Tensor* origin) {
  const at::Tensor& judged = origin != nullptr ? *origin : saved;
  const auto difference_here = [&](std::string forward, std::string now) {
    Difference made = difference(position, slot, judged, std::move(forward), std::move(now));
    if (log_) made.mismatch.recompute_op = log_->at(log_->size() - 1);
    made.recompute_operator = origin == nullptr ? at::sequence_number::peek() : 0;
    return made;
  };
  if (is_changed_capture(slot, judged)) {
    differences_.captures.push_back(difference_here(
        slot.metadata.text() + fmt::format(", version {}", slot.provenance.version),
        TensorMetadata(saved, slot.metadata.has_strides()).text() +
            fmt::format(", version {}{}", judged._version(),
                        known_storage_of(judged) == slot.provenance.storage._unsafe_get_target()
                            ? ""
                            : ", other storage")));
    if (is_other_leaf(slot.provenance, judged)) differences_.other_leaves.push_back(position);
    if (is_replaced(slot.provenance, judged) && !slot.is_older)
      differences_.replaced.push_back(position);
  }
  for (const auto& check : region_.checks())
    if (check->replaces_metadata()) return;
  if (region_.options.determinism_check == DeterminismCheck::None) return;
  const bool is_same_place = slot.follows == follows_ && is_same_kind(slot, judged);
  if (slot.metadata.describes(saved) && is_same_place) return;
  const auto text = [&](const TensorMetadata& metadata, bool requires_grad, bool follows) {
    return metadata.text() +
           (is_same_place   ? ""
            : requires_grad ? ", requires grad"
                            : ", requires no grad") +
           (slot.follows == follows_ ? ""
            : follows                ? ", of the operator that saved the one before"
                                     : ", the first of its operator");
  };
  differences_.metadata.push_back(
      difference_here(text(slot.metadata, slot.has_edge, slot.follows),
                      text(TensorMetadata(saved, slot.metadata.has_strides()),
                           has_raw_gradient_edge(judged), follows_)));
}

void Filler::note_operands() {
  for (const auto& [tensor, text] : operands_->new_state())
    differences_.operands.push_back({{-1, "another tensor, or none", text, {}, {}}, {}, tensor});
  differences_.has_new_state = !operands_->new_state().empty();
  for (const ChangedOperands::Change& each : operands_->changes()) {
    if (!each.is_read) continue;
    const auto alive = each.then->object.lock();
    const std::string what =
        alive ? TensorMetadata(at::Tensor(alive), false).text() : std::string("a tensor");
    const bool has_other_storage =
        alive && known_storage_of(at::Tensor(alive)) != each.then->storage._unsafe_get_target();
    SlotIdentity identity;
    identity.tensor = {each.then->object, each.then->storage};
    differences_.operands.push_back({{-1,
                                      fmt::format("{}, version {}", what, each.then->version),
                                      fmt::format("{}, version {}{}", what, each.version,
                                                  has_other_storage ? ", other storage" : ""),
                                      {},
                                      {},
                                      each.name},
                                     std::move(identity)});
  }
}

// The node of an operator that saves cannot be reached from here, but it can be reached from
// tensors that later operators save of its result. The last operator gets no name, since nothing
// later saves its result.
void Filler::name_operators(const at::Tensor& saved) {
  constexpr std::size_t max_named = 5;  // as many as an error lists
  const std::size_t num = std::min(differences_.metadata.size(), max_named);
  for (std::size_t i = 0; i < num; ++i) {
    Difference& each = differences_.metadata[i];
    if (each.recompute_operator == 0) continue;
    std::string name = seam::name_of_node(each.recompute_operator - 1, seam::node_of(saved));
    if (name.empty()) continue;
    each.mismatch.recompute_op = std::move(name);
    each.recompute_operator = 0;
  }
}

std::optional<Difference> Filler::take_parting() {
  if (first_beyond_) return std::move(first_beyond_);
  if (!view_.is_settled || num_seen_ >= num_slots_) return std::nullopt;
  std::optional<Difference> missing;
  slots_.with_slot(num_seen_, view_.is_settled, [&](const Slot& slot) {
    missing = Difference{{num_seen_, slot.metadata.text(), "(none)", {}, {}}, SlotIdentity(slot)};
  });
  return missing;
}

// Note [Made again]
// A tensor without grad that the region made can outlive the forward: a region inside captured it,
// or another thread still held it. It looks captured, and the recompute makes another one. Once the
// recompute has unwound, its values alone own a tensor that it made; a tensor held by an outside
// variable has more owners.
Differences Filler::take_differences() {
  for (const int64_t position : differences_.replaced)
    if (values_.owns_alone(position)) differences_.clear_capture(position);
  return std::move(differences_);
}

void Filler::compare_pending(uint64_t next_operator, bool is_end) {
  if (pending_.empty() || (!is_end && pending_.front().operator_number == next_operator)) return;
  for (const Pending& each : std::exchange(pending_, {})) {
    if (seam::version_of(each.tensor) != each.version) continue;
    for (const NoteOfSlot& then : each.in_forward) {
      std::string now =
          then.check == nullptr ? text_of_contents(each.tensor) : then.check->note(each.tensor);
      if (then.check == nullptr ? now == then.text : then.check->agrees(then.text, now)) continue;
      if (then.check == nullptr) {
        has_other_numbers_ = true;
        continue;
      }
      if (differences_.check == nullptr) differences_.check = then.check;
      if (differences_.check != then.check) continue;
      SlotIdentity slot_identity;
      slots_.with_slot(each.position, view_.is_settled,
                       [&](const Slot& slot) { slot_identity = SlotIdentity(slot); });
      auto [then_text, now_text] = then.check->texts(then.text, now);
      differences_.contents.push_back(
          {{each.position, std::move(then_text), std::move(now_text), {}, {}},
           std::move(slot_identity),
           each.identity});
    }
  }
}

}  // namespace remat
