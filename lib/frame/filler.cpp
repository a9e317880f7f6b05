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

Filler::Filler(const Region& region, const Slots& slots, RecordedFrame* recorded,
               RecomputedValues& values, int64_t only_position,
               const std::vector<at::Tensor>& inputs)
    : region_(region),
      slots_(slots),
      recorded_(recorded),
      values_(values),
      view_(slots.view_for(only_position)),
      // Code that a waiting forward has not run yet must not run in a recompute.
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
  // The function caught the stop signal and continued, so tensors saved from here on are ignored.
  // The signal is not thrown again: a function that retries until nothing is thrown could reach a
  // C++ Function that forward never ran, of which it is unknown whether it saves its own output.
  if (has_stopped_) return true;
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
    // Unwinding each stack frame that has a cleanup costs about as much as a small operator.
    return origin != nullptr ? stop_after_inputs(*this) : stops_soon();
  }
  return true;
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
      // Detached, since the recompute's graph may be freed before the contents are compared.
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
    recorded_->slot_event(recording::SlotEvent::Filled, position, {});
  const bool is_new = !values_.has(position);
  bytes_ += values_.put(position, std::move(value));
  num_filled_ += 1;
  num_new_ += is_new ? 1 : 0;
}

void Filler::refuse_changed(const Kept& kept) const {
  const bool is_known = kept.position >= 0 && kept.position < num_slots_;
  throw_changed_value(region_, kept.position,
                      is_known ? slots_.identity_of(kept.position) : SlotIdentity(), kept.tensor,
                      kept.version);
}

void Filler::note_members(const UserState* state) {
  if (state == nullptr) return;
  for (const auto& flags : state->registered().flags)
    differences_.has_other_members |= flags->has_other_members();
}

// The graph of a recompute dies when the function has unwound, unless a variable outside holds a
// tensor of it. Such a tensor keeps the graph alive, with our copies of the tensors that its nodes
// saved.
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
      "through it could free. Hint: save such an output with save_for_backward; return the "
      "tensor from the function (in a tuple, a vector, a struct with visit_tensors), or do "
      "it only if !remat::is_recomputing()."));
}

}  // namespace remat
