#include "lib/frame/slot_comparer.h"

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

GivenCounters::GivenCounters(const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& each : inputs)
    if (each.defined())
      all_.push_back({known_storage_of(each), each.unsafeGetTensorImpl()->version_counter()});
  if (all_.size() > 1)
    std::sort(all_.begin(), all_.end(),
              [](const Given& a, const Given& b) { return std::less<>()(a.storage, b.storage); });
}

c10::ArrayRef<GivenCounters::Given> GivenCounters::with(const c10::StorageImpl* storage) const {
  const auto first = std::lower_bound(
      all_.begin(), all_.end(), storage,
      [](const Given& a, const c10::StorageImpl* b) { return std::less<>()(a.storage, b); });
  auto last = first;
  while (last != all_.end() && last->storage == storage) ++last;
  return {first, last};
}

bool GivenCounters::has(const c10::StorageImpl* storage,
                        const c10::VariableVersion& counter) const {
  const auto given = with(storage);
  return std::any_of(given.begin(), given.end(), [&](const Given& each) {
    return seam::is_same_counter(each.counter, counter);
  });
}

bool GivenCounters::has(const CapturedOperand& operand) const {
  const auto object = operand.object.lock();
  const c10::StorageImpl* const storage =
      object ? known_storage_of(at::Tensor(object)) : operand.storage._unsafe_get_target();
  return has(storage, operand.counter);
}

SlotComparer::SlotComparer(const Region& region, const Slots& slots, const Progress& progress,
                           const std::vector<at::Tensor>& inputs)
    : region_(region), slots_(slots), progress_(progress), given_(inputs) {
  if (region.options.debug) log_.emplace();
}

void SlotComparer::begin(SavedNow& now) {
  now.operator_number = at::sequence_number::peek();
  if (!differences_.metadata.empty() && !log_) name_operators(now.tensor);
  if (!pending_.empty()) compare_pending(now.operator_number, /*is_end=*/now.input != nullptr);
  follows_ = may_follow_ && now.input == nullptr && now.operator_number == operator_before_;
  may_follow_ = now.input == nullptr;
  operator_before_ = now.operator_number;
}

void SlotComparer::end(const SavedNow& now, bool is_made_inside) {
  if (now.input != nullptr) compare_pending(0, /*is_end=*/true);
  if (operands_ != nullptr && differences_.operands.empty() &&
      std::this_thread::get_id() == owner_ && operands_->made(now.judged(), is_made_inside))
    note_operands();
}

void SlotComparer::note_beyond(const SavedNow& now) {
  if (!first_beyond_)
    first_beyond_ =
        Difference{{now.position, "(none)", TensorMetadata(now.tensor, false).text(), {}, {}},
                   {},
                   TensorIdentity::of(now.judged())};
}

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
bool SlotComparer::is_older_result(const Slot& slot, const at::Tensor& judged) const {
  const Provenance& then = slot.provenance;
  if (then.origin != Origin::Leaf || then.leaf.expired() || std::this_thread::get_id() != owner_)
    return false;
  const at::Tensor& root = seam::viewed(judged);
  return seam::node_of(root) != nullptr && !is_built_since(start_, root) &&
         !is_object(leaf_behind(judged), then.leaf) && !given_.has(known_storage_of(judged));
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

bool SlotComparer::is_changed_capture(const Slot& slot, const at::Tensor& judged) const {
  if (region_.options.capture_check != CaptureCheck::Raise || !progress_.is_forward_over())
    return false;
  if (is_older_result(slot, judged)) return true;
  if (is_other_leaf(slot.provenance,
                    judged))  // hooks may give back a different argument
    return !is_vouched(judged) &&
           (replay_ == nullptr || !replay_->is_copy(known_storage_of(judged))) &&
           !given_.has(known_storage_of(judged));
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
  return is_replaced_by_copy ? !given_.has(known_storage_of(judged)) : !given_.has(judged);
}

Difference SlotComparer::difference(const Slot& slot, const SavedNow& now, std::string forward_text,
                                    std::string now_text) const {
  Difference made{{now.position, std::move(forward_text), std::move(now_text), {}, {}},
                  SlotIdentity(slot),
                  TensorIdentity::of(now.judged()),
                  now.input == nullptr ? now.operator_number : 0};
  if (log_) {
    const RegionExtras& extras = *region_.extras;
    made.mismatch.forward_op = extras.forward_log.at(extras.saved_by.at(at_position(now.position)));
    made.mismatch.recompute_op = log_->at(log_->size() - 1);
  }
  return made;
}

void SlotComparer::compare(const Slot& slot, const SavedNow& now) {
  if (is_changed_capture(slot, now.judged())) note_capture(slot, now);
  compare_metadata(slot, now);
  const std::string* const note = slots_.note_of(now.position);
  if (note == nullptr) return;
  // Detached, since the recompute's graph may be freed before the contents are compared.
  pending_.push_back({now.position, now.operator_number, now.tensor.detach(),
                      seam::version_of(now.tensor), TensorIdentity::of(now.tensor), *note});
}

void SlotComparer::note_capture(const Slot& slot, const SavedNow& now) {
  const at::Tensor& judged = now.judged();
  const Provenance& then = slot.provenance;
  const bool has_storage = known_storage_of(judged) == then.storage._unsafe_get_target();
  differences_.captures.push_back(
      difference(slot, now, fmt::format("{}, version {}", slot.metadata.text(), then.version),
                 fmt::format("{}, version {}{}",
                             TensorMetadata(now.tensor, slot.metadata.has_strides()).text(),
                             judged._version(), has_storage ? "" : ", other storage")));
  if (is_other_leaf(then, judged)) differences_.other_leaves.push_back(now.position);
  if (is_replaced(then, judged) && !slot.is_older) differences_.replaced.push_back(now.position);
}

void SlotComparer::compare_metadata(const Slot& slot, const SavedNow& now) {
  if (region_.options.determinism_check == DeterminismCheck::None ||
      (region_.check() != nullptr && region_.check()->replaces_metadata()))
    return;
  const bool is_same_place = slot.follows == follows_ && is_same_kind(slot, now.judged());
  if (slot.metadata.describes(now.tensor) && is_same_place) return;
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
      difference(slot, now, text(slot.metadata, slot.has_edge, slot.follows),
                 text(TensorMetadata(now.tensor, slot.metadata.has_strides()),
                      has_raw_gradient_edge(now.judged()), follows_)));
}

void SlotComparer::note_operands() {
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
void SlotComparer::name_operators(const at::Tensor& saved) {
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

std::optional<Difference> SlotComparer::take_parting() {
  if (first_beyond_) return std::move(first_beyond_);
  const int64_t position = progress_.num_seen;
  if (!progress_.is_forward_over() || position >= progress_.num_slots()) return std::nullopt;
  std::optional<Difference> missing;
  slots_.with_slot(position, /*is_settled=*/true, [&](const Slot& slot) {
    missing = Difference{{position, slot.metadata.text(), "(none)", {}, {}}, SlotIdentity(slot)};
  });
  return missing;
}

// Note [Made again]
// A tensor without grad that the region made can outlive the forward: a region inside captured it,
// or another thread still held it. It looks captured, and the recompute makes another one. Once the
// recompute has unwound, its values alone own a tensor that it made; a tensor held by an outside
// variable has more owners.
Differences SlotComparer::take_differences(RecomputedValues& values) {
  for (const int64_t position : differences_.replaced)
    if (values.owns_alone(position)) differences_.clear_capture(position);
  return std::move(differences_);
}

void SlotComparer::compare_pending(uint64_t next_operator, bool is_end) {
  if (pending_.empty() || (!is_end && pending_.front().operator_number == next_operator)) return;
  const TensorCheck* const check = region_.check();
  for (const Pending& each : std::exchange(pending_, {})) {
    if (seam::version_of(each.tensor) != each.version) continue;
    const std::string now =
        check == nullptr ? text_of_contents(each.tensor) : check->note(each.tensor);
    if (check == nullptr) {
      differences_.has_other_numbers |= now != each.in_forward;
    } else if (!check->agrees(each.in_forward, now)) {
      SlotIdentity identity;
      slots_.with_slot(each.position, progress_.is_forward_over(),
                       [&](const Slot& slot) { identity = SlotIdentity(slot); });
      auto [then_text, now_text] = check->texts(each.in_forward, now);
      differences_.contents.push_back(
          {{each.position, std::move(then_text), std::move(now_text), {}, {}},
           std::move(identity),
           each.identity});
    }
  }
}

}  // namespace remat
