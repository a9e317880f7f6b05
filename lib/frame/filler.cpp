#include "lib/frame/filler.h"

#include <ATen/SequenceNumber.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "lib/base/counters.h"
#include "lib/base/once_per_name.h"
#include "lib/base/planted_fault.h"
#include "lib/base/unwinding.h"
#include "lib/scope/saving_input.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/engine.h"
#include "lib/seam/plain_tensor.h"
#include "lib/seam/script.h"
#include "lib/seam/warn.h"
#include "lib/state/user_state.h"
#include "lib/tensor/content_hash.h"
#include "lib/tensor/graph_walk.h"

namespace remat {

Filler::Filler(const Region& region, const Slots& slots, const RecordedFrame* recorded,
               RecomputedValues& values, int64_t only_position,
               const std::vector<at::Tensor>& inputs)
    : region_(region),
      slots_(slots),
      recorded_(recorded),
      values_(values),
      view_(slots.view_for(only_position)),
      // What forward has not run yet, as it waits for a backward, is not to be run by a recompute.
      early_stop_(region.options.early_stop || !view_.is_settled),
      num_slots_(static_cast<int64_t>(view_.is_needed.size())),
      task_at_start_(seam::graph_task_id()) {
  if (region.options.debug) log_.emplace();
  values_.reserve(view_.is_needed.size());
  for (const at::Tensor& each : inputs)
    if (each.defined())
      inputs_.push_back({known_storage_of(each), each.unsafeGetTensorImpl()->version_counter()});
  if (inputs_.size() > 1)
    std::sort(inputs_.begin(), inputs_.end(), [](const GivenInput& a, const GivenInput& b) {
      return std::less<>()(a.storage, b.storage);
    });
}

Filler::~Filler() {
  if (num_new_ > 0) count(live_counters.tensors_recomputed, num_new_);
  if (bytes_ != 0) count(live_counters.recomputed_bytes_alive, bytes_);
}

c10::ArrayRef<Filler::GivenInput> Filler::inputs_with(const c10::StorageImpl* storage) const {
  const auto first = std::lower_bound(
      inputs_.begin(), inputs_.end(), storage,
      [](const GivenInput& a, const c10::StorageImpl* b) { return std::less<>()(a.storage, b); });
  auto last = first;
  while (last != inputs_.end() && last->storage == storage) ++last;
  return {first, last};
}

bool Filler::gives(const CapturedOperand& operand) const {
  const auto object = operand.object.lock();
  const c10::StorageImpl* const storage =
      object ? known_storage_of(at::Tensor(object)) : operand.storage._unsafe_get_target();
  return gives(storage, operand.counter);
}

bool Filler::gives(const c10::StorageImpl* storage, const c10::VariableVersion& counter) const {
  const auto given = inputs_with(storage);
  return std::any_of(given.begin(), given.end(), [&](const GivenInput& each) {
    return seam::is_same_counter(each.counter, counter);
  });
}

bool Filler::fill(const at::Tensor& saved, Kept& own) {
  const Turns::Turn turn(saving_);
  const at::Tensor* const origin = take_input_being_saved();
  const at::Tensor& judged = origin != nullptr ? *origin : saved;
  // The recomputed graph and the slot share one alias without history: no cycle, no second copy.
  at::Tensor& kept = own.tensor;
  kept = saved.requires_grad() ? seam::alias_without_history(saved) : saved;
  // The function caught the signal and went on: nothing it saves now counts. It gets no second one: it may
  // try until nothing is thrown, and by another way than forward's meet a C++ Function of which forward
  // does not say whether it saves its own output.
  if (has_stopped_) return true;
  if (replay_ != nullptr) replay_->check_saved(saved);
  if (!differences_.metadata.empty() && !log_) name_operators(saved);
  const uint64_t operator_number = at::sequence_number::peek();
  const bool was_complete = is_complete();
  if (!pending_.empty()) compare_pending(operator_number, /*is_end=*/origin != nullptr);
  const int64_t position = own.position = num_seen_++;
  follows_ = may_follow_ && origin == nullptr && operator_number == operator_before_;
  may_follow_ = origin == nullptr;
  operator_before_ = operator_number;
  if (is_vouched(saved)) {
    const seam::DispatchModeOff unseen;
    const at::NoGradGuard no_grad;
    kept = saved.tensor_data().clone();
  }
  if (position < num_slots_ && view_.is_needed[static_cast<std::size_t>(position)])
    take(position, saved, origin, kept);
  if (has_too_many() && !first_beyond_)
    first_beyond_ = Difference{{position, "(none)", TensorMetadata(saved, false).text(), {}, {}},
                               {},
                               TensorIdentity::of(judged)};
  if (is_complete() && !was_complete) last_operator_ = operator_number;
  // A stop that waited for its operator to finish is due when another operator saves.
  if (was_complete && (operator_number != last_operator_ || origin != nullptr))
    must_finish_operator_ = false;
  if (wants_stop() && can_stop(judged, position)) {
    if (!has_too_many()) count(live_counters.early_stops);
    has_stopped_ = true;
    // Each frame on the way that has something to clean up costs about as much as a small operator.
    return origin != nullptr ? stop_after_inputs(*this) : stops_soon();
  }
  return true;
}

bool Filler::wants_stop() const {
  if (has_too_many()) return true;
  if (!is_complete() || !may_end()) return false;
  if (must_finish_operator_ || !pending_.empty()) return false;
  return !(view_.ends_small && num_seen_ == num_slots_);
}

bool Filler::may_end() const {
  return early_stop_ && (written_ == nullptr || written_->has_written_all());
}

// What a script has left to do is more than its operator.
bool Filler::stops_soon() const {
  return view_.last_is_small && num_seen_ == num_slots_ && may_stop_in_scripts_ &&
         region_.body->stop_soon();
}

// Note [Where a stop may be thrown]
// Not through a noexcept function, nor out of a destructor that saves while something unwinds.
// Around a backward, where it costs little, any function that nothing may pass is found: Note
// [Functions that nothing may pass]. Not on another thread, nor inside a backward that the function
// runs: the signal would cross the engine's worker loop. Not while a C++ Function may be saving its
// own output, before or after the tensor at hand: the list it saves from is cleared on the normal
// path only, and the output would leak. Whether it does is known from forward (`saves_own_output`),
// or seen here. The next save is asked again.
bool Filler::can_stop(const at::Tensor& saved, int64_t position) const {
  if (!is_on_own_ground()) return false;
  if (!may_stop_in_scripts_ && seam::is_in_script()) return false;
  if (is_planted(Fault::OwnOutput)) return true;
  if (is_made_by_function(saved)) return false;
  // Forward has not got there yet, so nothing is known of this operator.
  if (position >= num_slots_ && !view_.is_settled) return false;
  bool is_safe = true;
  if (position < num_slots_)
    slots_.with_slot(position, view_.is_settled,
                     [&](const Slot& slot) { is_safe = !slot.saves_own_output; });
  return is_safe;
}

void Filler::take(int64_t position, const at::Tensor& saved, const at::Tensor* origin,
                  const at::Tensor& kept) {
  Value value;
  value.version = seam::version_of(is_vouched(saved) ? kept : saved);
  bool is_made_inside = false;
  slots_.with_slot(position, view_.is_settled, [&](const Slot& slot) {
    compare(position, slot, saved, origin);
    must_finish_operator_ = slot.finish_operator && !is_planted(Fault::LateWrite);
    const Origin origin = slot.provenance.origin;
    is_made_inside =
        !slot.is_inner_input && (origin == Origin::Inside || origin == Origin::NoStorage);
    if (!saved.requires_grad() && !is_vouched(saved) &&
        (origin == Origin::Outside || origin == Origin::Input))
      value.alias =
          seam::alias_without_history(saved);  // its owner may give the object other storage
    if (const auto noted = slots_.notes_of(position); !noted.empty())
      // Without its history: whoever frees the recompute's graph does so before the contents are compared.
      pending_.push_back({position,
                          at::sequence_number::peek(),
                          saved.detach(),
                          seam::version_of(saved),
                          TensorIdentity::of(saved),
                          {noted.begin(), noted.end()}});
  });
  if (origin != nullptr) compare_pending(0, /*is_end=*/true);
  if (operands_ != nullptr && differences_.operands.empty() &&
      std::this_thread::get_id() == owner_ &&
      operands_->made(origin != nullptr ? *origin : saved, is_made_inside))
    note_operands();
  value.tensor = kept;
  value.is_own_alias = !kept.is_same(saved);
  constexpr std::size_t num_owners = 2;  // the graph's hook, and the value
  if (value.is_own_alias)
    value.num_companions = static_cast<uint8_t>(value.tensor.use_count() - num_owners);
  if (!saved.is_cpu()) value.ready = ready_.of(saved);
  if (is_planted(Fault::InnerInput) && origin != nullptr) {
    value.tensor = kept.new_zeros(kept.sizes());
    value.version = seam::version_of(value.tensor);
  }
  if (is_recording() && recorded_ != nullptr)
    recording::slot_event(EventKind::Fill, region_.info, position, {});
  const bool is_new = !values_.has(position);
  bytes_ += values_.put(position, std::move(value));
  num_filled_ += 1;
  num_new_ += is_new ? 1 : 0;
}

// Note [Another tensor in its place]
// A flag of a captured tensor, `requires_grad` above all, decides which tensors an operator saves. If it
// has changed since forward, the recompute saves one more or one less, and all that follow come to the
// slots of others. Shapes may agree. So a tensor must also require grad as forward's did, unless it is
// the same tensor or the cast of a leaf that changed likewise, and begin or continue the tensors of one
// operator as forward's did.
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

// Another leaf in the place of a leaf may have been made inside. A result that was there before the recompute was not, and
// forward had a leaf: the variable that the function captured has been assigned another tensor since, as fast weights are.
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
// Where forward saved a leaf that requires grad, the recompute may save another one: the function
// makes a leaf in each of its runs (`z = x.detach().requires_grad_()`), or reads a variable that has
// been given another one since, such as a parameter that was replaced, or that stood in for a
// module's own around forward. Forward's leaf lives as long as its graph, so contents tell: a
// function that computes the same makes equal leaves. If forward's has been changed since, there is
// nothing to compare with.
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
                    judged))  // what hooks give back of an argument may differ from it
    return !is_vouched(judged) &&
           (replay_ == nullptr || !replay_->is_copy(known_storage_of(judged))) &&
           inputs_with(known_storage_of(judged)).empty();
  if (!is_changed(slot.provenance, judged)) return false;
  if (is_vouched(judged) &&
      slot.provenance.storage._unsafe_get_target() == known_storage_of(judged))
    return false;
  if (slot.provenance.origin != Origin::Input) return true;
  // An argument itself is checked when it is unpacked, a kept alias of it when it is given out, and hooks
  // may give back copies of both, or restore the argument in its own storage; a captured alias with a
  // version of its own is not checked elsewhere.
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

// The node of an operator that saves cannot be reached from here; from what later operators save of its result it can.
// Of the last one nothing is saved: it has no name.
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
// or another thread still held it. It looks captured, and the recompute makes another one. Now that
// the recompute has unwound, nobody but the run owns what it made; what an outside variable holds
// has more owners.
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

void Filler::refuse_changed(const Kept& kept) const {
  const bool is_known = kept.position >= 0 && kept.position < num_slots_;
  throw_changed_value(region_, kept.position,
                      is_known ? slots_.identity_of(kept.position) : SlotIdentity(), kept.tensor,
                      kept.version);
}

void Filler::stop() {
  region_.body->stop();
  report_returned("stop");
}

void Filler::stop_before_backward() {
  if (!has_stopped_) {
    if (!is_complete() || !may_end() || has_too_many() || !is_on_own_ground()) return;
    if (!can_unwind_to(this)) return;
    count(live_counters.early_stops);
    has_stopped_ = true;
  } else if (!is_on_own_ground() || !can_unwind_to(this)) {
    return;
  }
  stop();
}

// Inside of a backward there is no stop, and what the function does next may save nothing: it may write to an argument in
// place, before forward does.
void Filler::stop_after_backward() {
  if (view_.is_settled || !is_complete() || !is_on_own_ground() || !can_unwind_to(this)) return;
  if (!has_stopped_) count(live_counters.early_stops);
  has_stopped_ = true;
  stop();
}

bool Filler::is_on_own_ground() const {
  return std::this_thread::get_id() == owner_ && seam::graph_task_id() == task_at_start_ &&
         region_.body->can_be_stopped() && std::uncaught_exceptions() == uncaught_at_start_;
}

void Filler::note_members(const UserState* state) {
  if (state == nullptr) return;
  for (const auto& held : state->registered().held)
    differences_.has_other_members |= held->has_other_members();
}

// The graph of a recompute is nobody's: it dies when the function has unwound. A tensor put into a variable
// outside keeps it, with copies of ours of what its nodes saved.
void Filler::warn_of_survivors(bool has_run_backward) const {
  if (has_run_backward) return;  // threads of devices may still hold parts of it
  const bool survives =
      std::any_of(values_.values.begin(), values_.values.end(), [](const Value& each) {
        return each.is_own_alias && each.tensor.use_count() > 1U + each.num_companions;
      });
  if (!survives) return;
  static OncePerName warned;
  const std::string& name = region_.info.name();
  if (!warned.is_first(name)) return;
  seam::warn(c10::str(
      "remat::checkpoint: a tensor that a recompute of ",
      name.empty() ? "a region without a name" : "region \"" + name + "\"",
      " computed is still there after it. Cause: the function puts it into a variable outside (a "
      "list of auxiliary losses, a member that holds an attention map), once in forward and again "
      "in each recompute: what it appends to counts twice, and the recompute's graph stays in "
      "memory; or a custom Function keeps its own output in its context, which only a backward "
      "through it could free. Do: save such an output with save_for_backward; return the "
      "tensor from the function (in a tuple, a vector, a struct with visit_tensors), or do "
      "it only if !remat::is_recomputing()."));
}

}  // namespace remat
