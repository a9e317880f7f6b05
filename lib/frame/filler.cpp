#include "lib/frame/filler.h"

#include <algorithm>
#include <utility>

#include "lib/base/counters.h"
#include "lib/base/once_per_name.h"
#include "lib/base/planted_fault.h"
#include "lib/scope/saving_input.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/plain_tensor.h"
#include "lib/seam/warn.h"

namespace remat {

Filler::Filler(const Region& region, const Slots& slots, RecordedFrame* recorded,
               RecomputedValues& values, int64_t only_position,
               const std::vector<at::Tensor>& inputs)
    : region_(region),
      slots_(slots),
      recorded_(recorded),
      values_(values),
      progress_{slots.view_for(only_position), /*counts_rest=*/!region.options.early_stop},
      stops_(region, slots, progress_),
      comparer_(region, slots, progress_, inputs) {
  values_.reserve(progress_.view.is_needed.size());
}

Filler::~Filler() {
  if (num_new_ > 0) count(live_counters.tensors_recomputed, num_new_);
  if (bytes_ != 0) count(live_counters.recomputed_bytes_alive, bytes_);
}

bool Filler::fill(const at::Tensor& saved, Kept& own) {
  const Turns::Turn turn(saving_);
  SavedNow now{saved, take_input_being_saved()};
  // The recomputed graph and the slot share one alias without history: no cycle, no second copy.
  at::Tensor& kept = own.tensor;
  kept = saved.requires_grad() ? seam::alias_without_history(saved) : saved;
  // The function caught the stop signal and continued, so tensors saved from here on are ignored.
  // The signal is not thrown again: a function that retries until nothing is thrown could reach a
  // C++ Function that forward never ran, of which it is unknown whether it saves its own output.
  if (has_stopped()) return true;
  comparer_.begin(now);
  const bool was_complete = progress_.is_complete();
  now.position = own.position = progress_.num_seen++;
  if (comparer_.is_vouched(saved)) {
    const seam::DispatchModeOff unseen;
    const at::NoGradGuard no_grad;
    kept = saved.tensor_data().clone();
  }
  if (now.position < progress_.num_slots() && progress_.view.is_needed[at_position(now.position)])
    take(now, kept);
  if (progress_.has_too_many()) comparer_.note_beyond(now);
  if (!stops_.ends_at(now, was_complete, comparer_.is_comparing())) return true;
  // Unwinding each stack frame that has a cleanup costs about as much as a small operator.
  return now.input != nullptr ? stop_after_inputs(*this) : stops_.ends_soon();
}

void Filler::take(const SavedNow& now, const at::Tensor& kept) {
  const at::Tensor& saved = now.tensor;
  const bool is_vouched = comparer_.is_vouched(saved);
  Value value;
  value.version = seam::version_of(is_vouched ? kept : saved);
  bool is_made_inside = false;
  slots_.with_slot(now.position, progress_.is_forward_over(), [&](const Slot& slot) {
    comparer_.compare(slot, now);
    stops_.took(slot);
    const Origin origin = slot.provenance.origin;
    is_made_inside =
        !slot.is_inner_input && (origin == Origin::Inside || origin == Origin::NoStorage);
    if (!saved.requires_grad() && !is_vouched &&
        (origin == Origin::Outside || origin == Origin::Input))
      value.alias =
          seam::alias_without_history(saved);  // its owner may give the object other storage
  });
  comparer_.end(now, is_made_inside);
  value.tensor = kept;
  value.is_own_alias = !kept.is_same(saved);
  constexpr std::size_t num_owners = 2;  // the graph's hook, and the value
  if (value.is_own_alias)
    value.num_companions = static_cast<uint8_t>(value.tensor.use_count() - num_owners);
  if (!saved.is_cpu()) value.ready = ready_.of(saved);
  if (is_planted(Fault::InnerInput) && now.input != nullptr) {
    value.tensor = kept.new_zeros(kept.sizes());
    value.version = seam::version_of(value.tensor);
  }
  if (is_recording() && recorded_ != nullptr)
    recorded_->slot_event(recording::SlotEvent::Filled, now.position, {});
  num_new_ += values_.has(now.position) ? 0 : 1;
  bytes_ += values_.put(now.position, std::move(value));
  progress_.num_filled += 1;
}

void Filler::refuse_changed(const Kept& kept) const {
  const bool is_known = kept.position >= 0 && kept.position < progress_.num_slots();
  throw_changed_value(region_, kept.position,
                      is_known ? slots_.identity_of(kept.position) : SlotIdentity(), kept.tensor,
                      kept.version);
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
      " computed is still alive after the recompute. Cause: the function stores it outside (in a "
      "list of auxiliary losses, in a member that holds an attention map), once in forward and "
      "again in each recompute: an appended tensor counts twice, and the recompute's graph stays "
      "in memory. Or a custom Function keeps its own output in its context, which only a "
      "backward through that output could free. Hint: return the tensor from the function (in a "
      "tuple, a vector, a struct with visit_tensors), or store it only if "
      "!remat::is_recomputing(); in a custom Function, save the output with save_for_backward."));
}

}  // namespace remat
