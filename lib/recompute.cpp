#include "lib/recompute.h"

#include <ATen/SequenceNumber.h>

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "hooks/collect.h"
#include "lib/counters.h"
#include "lib/engine_seam.h"
#include "lib/frame.h"
#include "lib/hook_stack.h"
#include "lib/match.h"
#include "lib/stack_room.h"

namespace remat {

namespace {

/// The values of one recompute come in through it, one for each tensor that autograd saves.
class Filler final : public SlotFiller {
 public:
  Filler(Frame& frame, Run& run, int64_t only_position, bool early_stop)
      : frame_(frame),
        run_(run),
        early_stop_(early_stop),
        view_(frame.view_for(only_position)),
        num_slots_(static_cast<int64_t>(view_.is_needed.size())),
        task_at_start_(seam::graph_task_id()) {
    if (frame.options().debug) log_.emplace();
  }

  at::Tensor fill(const at::Tensor& saved) override;
  /// The function is about to run a backward. No operator is under way here, so a recompute that has
  /// all it needs ends: that backward ran in the forward, and would accumulate its gradients again.
  void stop_before_backward();
  /// The function has ended, by a return or a stop: takes what waited for it.
  void finish() { compare_pending(0, /*is_end=*/true); }

  bool is_complete() const { return num_filled_ == view_.num_needed; }
  bool has_stopped() const { return has_stopped_; }
  /// A tensor saved after another thread had drawn in forward came back with other contents.
  bool has_other_numbers() const { return has_other_numbers_; }
  /// More tensors came than forward saved, and forward is over.
  bool has_too_many() const { return view_.is_settled && num_seen_ > num_slots_; }
  int64_t num_slots() const { return num_slots_; }
  int64_t num_seen() const { return num_seen_; }
  /// After the function has unwound.
  Differences take_differences();
  OpLog* log() { return log_ ? &*log_ : nullptr; }

 private:
  void take(int64_t position, const at::Tensor& saved, const at::Tensor& kept);
  void compare(int64_t position, const Slot& slot, const at::Tensor& saved);
  void compare_pending(uint64_t next_group, bool is_end);
  bool wants_stop() const;
  bool is_on_own_ground() const;
  bool can_stop(const at::Tensor& saved, int64_t position) const;

  Frame& frame_;
  Run& run_;
  const bool early_stop_;
  const Frame::SlotView view_;
  const int64_t num_slots_;
  const int64_t task_at_start_;
  const std::thread::id owner_ = std::this_thread::get_id();
  const int uncaught_at_start_ = std::uncaught_exceptions();
  std::optional<OpLog> log_;
  Differences differences_;
  struct Pending {
    int64_t position;
    uint64_t group;
    at::Tensor tensor;
    std::string in_forward;
  };
  std::vector<Pending> pending_;  // contents to compare when their operator has returned
  uint64_t last_group_ = 0;       // of the operator that filled the last needed slot
  bool must_finish_operator_ = false;
  int64_t num_seen_ = 0, num_filled_ = 0;
  bool has_stopped_ = false;
  bool has_other_numbers_ = false;
};

at::Tensor Filler::fill(const at::Tensor& saved) {
  const at::Tensor* const origin = input_being_saved();
  const at::Tensor& judged = origin != nullptr ? *origin : saved;
  if (has_stopped_) {
    // The function caught the signal and went on: nothing it saves now counts, and it gets the
    // signal again.
    if (can_stop(judged, num_slots_)) throw StopSignal{};
    return saved.requires_grad() ? saved.tensor_data() : saved;
  }
  const uint64_t group = at::sequence_number::peek();
  const bool was_complete = is_complete();
  if (!pending_.empty()) compare_pending(group, /*is_end=*/origin != nullptr);
  const int64_t position = num_seen_++;
  // The recomputed graph and the slot share one alias without history: no cycle, no second copy.
  at::Tensor kept = saved.requires_grad() ? saved.tensor_data() : saved;
  if (position < num_slots_ && view_.is_needed[static_cast<std::size_t>(position)])
    take(position, saved, kept);
  if (is_complete() && !was_complete) last_group_ = group;
  // A stop that waited for its operator to finish is due when another operator saves.
  if (was_complete && (group != last_group_ || origin != nullptr)) must_finish_operator_ = false;
  if (wants_stop() && can_stop(judged, position)) {
    if (!has_too_many()) count(live_counters.early_stops);
    has_stopped_ = true;
    throw StopSignal{};
  }
  return kept;
}

bool Filler::wants_stop() const {
  if (has_too_many()) return true;
  if (!is_complete() || !early_stop_) return false;
  if (must_finish_operator_ || !pending_.empty()) return false;
  return !(view_.ends_small && num_seen_ == num_slots_);
}

// Note [Where a stop may be thrown]
// Not through a noexcept function, nor out of a destructor that saves while something unwinds. Not on another thread, nor inside a backward that the function runs: the signal would cross the
// engine's worker loop. Not while a C++ Function may be saving its own output, before or after the
// tensor at hand: the list it saves from is cleared on the normal path only, and the output would
// leak. Whether it does is known from forward (`saves_own_output`), or seen here. The next save is
// asked again.
bool Filler::can_stop(const at::Tensor& saved, int64_t position) const {
  if (!is_on_own_ground() || is_made_by_function(saved)) return false;
  bool is_safe = true;
  if (position < num_slots_)
    frame_.with_slot(position, view_.is_settled,
                     [&](const Slot& slot) { is_safe = !slot.saves_own_output; });
  return is_safe;
}

void Filler::take(int64_t position, const at::Tensor& saved, const at::Tensor& kept) {
  Value value;
  value.version = static_cast<uint32_t>(saved._version());
  frame_.with_slot(position, view_.is_settled, [&](const Slot& slot) {
    compare(position, slot, saved);
    must_finish_operator_ = slot.finish_operator;
    const Origin origin = slot.provenance.origin;
    if (!saved.requires_grad() && (origin == Origin::Outside || origin == Origin::Input))
      value.alias = saved.tensor_data();  // its owner may give the object other storage
    if (auto in_forward = frame_.expected_contents(position))
      pending_.push_back({position, at::sequence_number::peek(), saved, *std::move(in_forward)});
  });
  value.tensor = kept;
  const bool is_new = !run_.has(position);
  run_.put(position, std::move(value));
  num_filled_ += 1;
  if (is_new) count(live_counters.tensors_recomputed);
}

void Filler::compare(int64_t position, const Slot& slot, const at::Tensor& saved) {
  const auto mismatch = [&](std::string forward, std::string now) {
    CheckpointError::Mismatch m{position, std::move(forward), std::move(now), {}, {}};
    if (log_) {
      const FrameExtras& extras = *frame_.extras();
      const auto index = static_cast<std::size_t>(position);
      if (index < extras.saved_by.size())
        m.forward_op = extras.forward_log.at(extras.saved_by[index]);
      m.recompute_op = log_->at(log_->size() - 1);
    }
    return m;
  };
  const at::Tensor* const origin = input_being_saved();
  const at::Tensor& judged = origin != nullptr ? *origin : saved;
  if (frame_.options().capture_check == CaptureCheck::Raise && view_.is_settled &&
      is_changed(slot.provenance, judged)) {
    differences_.captures.push_back(
        mismatch(slot.description.text() + fmt::format(", version {}", slot.provenance.version),
                 Description(saved, slot.description.has_strides()).text() +
                     fmt::format(", version {}{}", judged._version(),
                                 storage_of(judged) == slot.provenance.storage._unsafe_get_target()
                                     ? ""
                                     : ", other storage")));
    if (is_replaced(slot.provenance, judged)) differences_.replaced.push_back(position);
  }
  if (frame_.extras() != nullptr && frame_.extras()->fingerprint) return;  // compared instead
  if (frame_.options().determinism_check == DeterminismCheck::None) return;
  if (!slot.description.describes(saved))
    differences_.metadata.push_back(mismatch(
        slot.description.text(), Description(saved, slot.description.has_strides()).text()));
}

// Note [Made again]
// A tensor without grad that the region made can outlive the forward: a region inside captured it,
// or another thread still held it. It looks captured, and the recompute makes another one. Now that
// the recompute has unwound, nobody but the run owns what it made; what an outside variable holds
// has more owners.
Differences Filler::take_differences() {
  for (const int64_t position : differences_.replaced)
    if (run_.owns_alone(position))
      std::erase_if(differences_.captures,
                    [&](const CheckpointError::Mismatch& m) { return m.position == position; });
  return std::move(differences_);
}

void Filler::compare_pending(uint64_t next_group, bool is_end) {
  if (pending_.empty() || (!is_end && pending_.front().group == next_group)) return;
  for (const Pending& each : std::exchange(pending_, {})) {
    std::string now = frame_.contents_of(each.tensor);
    if (now == each.in_forward) continue;
    if (!frame_.compares_contents()) {
      has_other_numbers_ = true;
      continue;
    }
    const bool is_text = frame_.extras() != nullptr && frame_.extras()->fingerprint;
    const char* const what = is_text ? "fingerprint " : "hash ";
    differences_.contents.push_back({each.position, what + each.in_forward, what + now, {}, {}});
  }
}

void Filler::stop_before_backward() {
  if (!has_stopped_) {
    if (!is_complete() || !early_stop_ || has_too_many() || !is_on_own_ground()) return;
    count(live_counters.early_stops);
    has_stopped_ = true;
  } else if (!is_on_own_ground()) {
    return;
  }
  throw StopSignal{};
}

bool Filler::is_on_own_ground() const {
  return std::this_thread::get_id() == owner_ && seam::graph_task_id() == task_at_start_ &&
         frame_.body().can_be_stopped() && std::uncaught_exceptions() == uncaught_at_start_;
}

/// The scope of a recompute, alone on the stack while the function runs again.
class RecomputeScope final : public detail::Scope {
 public:
  RecomputeScope(c10::intrusive_ptr<Frame> frame, SlotFiller& filler, DrawPlan draws)
      : frame_(std::move(frame)), filler_(filler), replay_(std::move(draws)) {
    early_stop = frame_->options().early_stop_guard;
    debug = frame_->options().debug_guard;
    is_recompute = is_inside_recompute = true;
    answers(detail::Ability::Hooks);
    answers(detail::Ability::Region);
    if (early_stop) answers(detail::Ability::EarlyStop);
    if (debug) answers(detail::Ability::Debug);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    // A thread that merely inherited the stack (at::launch) saves plainly; an engine thread that
    // runs a backward inside the region fills slots while the owner waits for it.
    if (std::this_thread::get_id() != owner_ && seam::graph_task_id() < 0) return nullptr;
    return std::make_unique<Collect>(filler_);
  }
  Frame* frame() const override { return frame_.get(); }
  DrawReplay& replay() { return replay_; }
  DrawReplay* draw_replay() override {
    return frame_->options().preserve_rng_state ? &replay_ : nullptr;
  }

 private:
  c10::intrusive_ptr<Frame> frame_;
  SlotFiller& filler_;
  DrawReplay replay_;
  const std::thread::id owner_ = std::this_thread::get_id();
};

/// The recomputes this thread is running, innermost last.
struct ActiveRuns {
  struct Entry {
    Frame* frame;
    Run* run;
    Filler* filler;
  };
  std::vector<Entry> entries;
};
ActiveRuns& active_runs() {
  thread_local ActiveRuns runs;
  return runs;
}

struct RunOnThisThread {
  RunOnThisThread(Frame& frame, Run& run, Filler& filler) {
    active_runs().entries.push_back({&frame, &run, &filler});
  }
  ~RunOnThisThread() { active_runs().entries.pop_back(); }
};

/// Runs the function again. Returns normally after a stop too; false if another thread disturbed
/// its random numbers.
bool run_again(const c10::intrusive_ptr<Frame>& frame, Filler& filler, DrawPlan draws,
               std::vector<at::Tensor>& inputs) {
  const auto scope = std::make_shared<RecomputeScope>(frame, filler, std::move(draws));
  const DefaultGeneratorSwap generator(scope->replay().plan());
  AmbientRestore ambient(frame->snapshot());
  detail::StackSwap clean(scope);
  OpLogScope logging(filler.log());
  Scope user_scope;
  if (frame->extras() != nullptr && frame->extras()->contexts.recompute)
    user_scope = frame->extras()->contexts.recompute();
  try {
    frame->body().run_again(inputs);
  } catch (const StopSignal&) {
  } catch (...) {
    // User code may turn the signal into an exception of its own; all that is needed is there.
    if (!filler.has_stopped()) throw;
  }
  filler.finish();
  return !generator.was_disturbed();
}

constexpr int max_attempts = 5;

/// One attempt; false if it was disturbed: nothing of it is kept.
bool try_recompute(const c10::intrusive_ptr<Frame>& frame, Run& run, int64_t only_position) {
  count(live_counters.recomputes);
  try {
    std::vector<at::Tensor> inputs = frame->unpack_inputs();
    DrawPlan draws = frame->draw_log() != nullptr ? frame->draw_log()->plan() : DrawPlan();
    Filler filler(*frame, run, only_position,
                  /*early_stop=*/frame->options().early_stop && !draws.uses_default());
    RunOnThisThread active(*frame, run, filler);
    if (!run_again(frame, filler, std::move(draws), inputs)) {
      run.clear();
      return false;
    }
    if (filler.has_other_numbers())
      throw_recompute_failed(
          *frame, "the recompute gave other values than forward, in which another thread drew",
          "a thread that the function starts itself draws from the default CPU generator, or an "
          "operator of the region gives other values each time it runs (Rule 11)",
          "draw on the thread that calls the region, or set preserve_rng_state = false if other "
          "numbers do no harm");
    if (filler.has_too_many() || !filler.is_complete())
      throw_count_mismatch(*frame, filler.num_slots(), filler.num_seen(), filler.take_differences(),
                           filler.log());
    if (Differences differences = filler.take_differences(); differences.any())
      throw_differences(*frame, std::move(differences), filler.log());
    return true;
  } catch (const std::exception&) {
    run.clear();
    throw;
  } catch (...) {
    run.clear();
    // The engine's threads catch nothing else; an exception of another type would end the process.
    throw_recompute_failed(
        *frame,
        "the function threw something that is not a std::exception during the "
        "recompute",
        "the autograd engine carries exceptions derived from std::exception only",
        "derive the exception type from std::exception");
  }
}

}  // namespace

void recompute_waits_for_backward() {
  if (active_runs().entries.empty()) return;
  active_runs().entries.back().filler->stop_before_backward();
  for (const ActiveRuns::Entry& each : active_runs().entries)
    each.frame->owner_waits_for_backward(*each.run);
}

void recompute(const c10::intrusive_ptr<Frame>& frame, Run& run, int64_t only_position) {
  if (!has_stack_room())
    throw_recompute_failed(*frame, "regions are nested too deep for this thread's stack",
                           "each level of nesting is recomputed inside the next",
                           "nest less deep, or run backward on a thread with a larger stack");
  for (int attempt = 1; !try_recompute(frame, run, only_position); ++attempt)
    if (attempt == max_attempts)
      throw_recompute_failed(*frame, "the recompute could not draw the numbers that forward drew",
                             "the region takes numbers from the default CPU generator past "
                             "LibTorch's operators, or seeds it, while another thread draws from "
                             "it too, in forward or now (Rule 11)",
                             "let one thread at a time draw from it, or set preserve_rng_state = "
                             "false if other numbers do no harm");
}

}  // namespace remat
