#include "lib/frame/recompute.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "hooks/collect.h"
#include "lib/base/counters.h"
#include "lib/base/planted_fault.h"
#include "lib/base/spin_lock.h"
#include "lib/base/stack_room.h"
#include "lib/frame/filler.h"
#include "lib/frame/frame.h"
#include "lib/frame/gradient_sinks.h"
#include "lib/frame/inner_backward.h"
#include "lib/frame/mismatch.h"
#include "lib/frame/outside_tensors.h"
#include "lib/observe/profiler.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/engine.h"
#include "lib/seam/variable_hooks.h"
#include "lib/selective/replay.h"

namespace remat {

namespace {

/// See EarlyGuards. Their CPU generators are drawn from themselves, since the function may seed them too,
/// and put back.
class Early {
 public:
  DrawReplay* replay_of(const c10::GeneratorImpl& generator) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Generator& each : generators_)
      if (&each.replay.original() == &generator) return &each.replay;
    return nullptr;
  }
  void add(const at::Generator& generator, at::CPUGeneratorImpl& impl) {
    std::lock_guard<std::mutex> lock(mutex_);
    generators_.emplace_back(generator, impl);
  }
  void put_back() noexcept {
    guards.put_back();
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto each = generators_.rbegin(); each != generators_.rend(); ++each) each->swap.reset();
  }
  EarlyGuards guards;

 private:
  struct Generator {
    Generator(at::Generator kept, at::CPUGeneratorImpl& impl)
        : generator(std::move(kept)), replay(impl), swap(std::in_place, replay) {}
    const at::Generator generator;
    DrawReplay replay;  // as long as threads may have inherited the scope
    std::optional<GeneratorSwap> swap;
  };
  std::mutex mutex_;
  std::list<Generator> generators_;
};

/// Of the recompute in which this thread is about to recompute another region, or null.
const LockOwner* lock_owner_around() {
  const LockOwner* around = nullptr;
  detail::visit(detail::Ability::Region, [&](const detail::Scope& scope) {
    if (around == nullptr) around = scope.lock_owner();
  });
  return around;
}

/// The scope of a recompute, alone on the stack while the function runs again.
class RecomputeScope final : public detail::Scope {
 public:
  RecomputeScope(c10::intrusive_ptr<Frame> frame, Filler& filler)
      : frame_(std::move(frame)), filler_(filler) {
    if (DrawLog* log = frame_->draw_log(default_cpu_generator())) replay_.emplace(*log);
    if (frame_->user_state() != nullptr) {
      for (const auto& log : frame_->user_state()->draw_logs()) more_replays_.emplace_back(*log);
      answers(detail::Ability::State);
    }
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
    if (!is_own_thread()) return nullptr;
    return std::make_unique<Collect>(filler_);
  }
  Frame* frame() const override { return frame_.get(); }
  bool is_own_thread() const override {
    return std::this_thread::get_id() == owner_ || seam::graph_task_id() >= 0;
  }
  void begin_replay(const std::vector<at::Tensor>& inputs) {
    if (frame_->selection() == nullptr) return;
    selective_.emplace(*frame_, filler_, inputs);
    filler_.set_replay(&*selective_);
  }
  Replay* replay() override { return selective_ && is_own_thread() ? &*selective_ : nullptr; }
  void knows_inputs(const std::vector<at::Tensor>& inputs) {
    for (const at::Tensor& each : inputs)
      aliases_.push_back(each.defined() ? WeakEdge(each) : WeakEdge());
  }
  void backward_begins(const torch::autograd::edge_list& roots,
                       const torch::autograd::edge_list& targets, bool accumulates) override {
    if (!is_own_thread()) return;
    filler_.end_operator();
    const InnerBackwards::Asked asked = frame_->asked_by_backward(num_backwards_++);
    // What this run was to compute may be there already; then its gradients are nobody's.
    const char* reason = filler_.is_complete()
                             ? nullptr
                             : against(asked, frame_->inputs(), aliases_, roots, targets);
    if (sinks_ && reason == nullptr) reason = sinks_->against(roots, targets, accumulates);
    if (reason != nullptr) refuse_here(reason);
  }
  // See Note [Accumulating once].
  void begin_sinks() {
    if (auto leaves = frame_->accumulated_leaves(); !leaves.is_empty())
      sinks_ = std::make_unique<GradientSinks>(std::move(leaves));
  }
  const seam::NodePtr* gradient_sink(const at::TensorBase& tensor) override {
    return sinks_ ? sinks_->sink_of(tensor) : nullptr;
  }
  // See Note [Tensors from outside].
  void set_outside(OutsideTensors* outside) { outside_ = outside; }
  std::optional<unsigned> known_hook(const at::TensorBase& tensor) override {
    if (outside_ == nullptr || is_planted(Fault::HookTwice)) return std::nullopt;
    const auto note = frame_->noted_hook(tensor, outside_->count_hook(tensor));
    if (!note || !seam::has_hook(tensor, note->handle)) return std::nullopt;
    if (note->follows_backward && num_backwards_ > 0) refuse_here(hook_after_backward);
    return note->handle;
  }
  void hook_registered(const at::TensorBase& tensor, unsigned handle, bool is_new) override {
    if (is_new && outside_ != nullptr) outside_->note_hook(tensor, handle);
  }
  void requires_grad_changes(const at::TensorBase& tensor) override {
    if (outside_ != nullptr) outside_->note_requires_grad(tensor);
  }
  DrawReplay* draw_replay(const c10::GeneratorImpl& generator) override {
    if (replay_ && &replay_->original() == &generator) return &*replay_;
    for (DrawReplay& each : more_replays_)
      if (&each.original() == &generator) return &each;
    Early* const early = early_.load();
    return early == nullptr ? nullptr : early->replay_of(generator);
  }
  const LockOwner* lock_owner() const override { return &lock_owner_; }
  void guard_opened(const UserRegistrations& opened) override {
    if (filler_.is_forward_over()) return;
    const bool preserves_rng = frame_->options().preserve_rng_state;
    if (early_.load() == nullptr) {
      auto made = std::make_unique<Early>();
      std::lock_guard<SpinLock> lock(own_early_lock_);
      if (own_early_ == nullptr) early_ = (own_early_ = std::move(made)).get();
    }
    Early& early = *early_.load();
    early.guards.add(opened, frame_->user_state(), preserves_rng);
    if (!preserves_rng || std::this_thread::get_id() != owner_) return;  // who puts back
    for (const at::Generator& generator : opened.generators) {
      at::CPUGeneratorImpl* const impl = as_cpu_generator(generator);
      if (impl != nullptr && draw_replay(*impl) == nullptr) early.add(generator, *impl);
    }
  }
  void put_back_early_guards() noexcept {
    if (Early* const early = early_.load()) early->put_back();
  }
  void add_to(UserRegistrations& all) const override {
    const UserRegistrations& kept = frame_->user_state()->registered();
    for (const auto& provider : kept.providers) all.add(provider);
    for (const auto& held : kept.held) all.add(held);
    for (const at::Generator& generator : kept.generators) all.add(generator);
    all.observers.insert(all.observers.end(), kept.observers.begin(), kept.observers.end());
  }
  template <class Visitor>
  void visit_replays(Visitor&& visitor) const {
    if (replay_) visitor(*replay_);
    for (const DrawReplay& each : more_replays_) visitor(each);
  }
  /// Whether numbers were taken past the operators: where the function ends must be looked at.
  bool uses_original() const {
    bool uses = false;
    visit_replays([&](const DrawReplay& each) { uses = uses || each.plan().uses_original(); });
    return uses;
  }

 private:
  void refuse_here(const char* reason) {
    try {
      refuse_backward(reason);
    } catch (...) {
      filler_.note_refusal();  // also if the function catches it
      // Through a noexcept function it cannot go: the run ends with it.
      if (frame_->body().can_be_stopped() && std::uncaught_exceptions() == 0) throw;
    }
  }

  c10::intrusive_ptr<Frame> frame_;
  Filler& filler_;
  OutsideTensors* outside_ = nullptr;
  std::unique_ptr<GradientSinks> sinks_;  // of few
  std::optional<Replay> selective_;
  std::optional<DrawReplay> replay_;    // of the default generator
  std::list<DrawReplay> more_replays_;  // of registered ones
  // Rarely there.
  SpinLock own_early_lock_;
  std::unique_ptr<Early> own_early_;
  std::vector<WeakEdge> aliases_;  // of the inputs, if a backward of forward's asked for one
  std::atomic<int64_t> num_backwards_{0};
  std::atomic<Early*> early_{nullptr};  // the same, for threads that inherited the scope
  const std::thread::id owner_ = std::this_thread::get_id();
  const LockOwner lock_owner_{lock_owner_around()};
};

/// The recomputes this thread is running, innermost last.
struct ActiveRuns {
  struct Entry {
    Frame* frame;
    Run* run;
    Filler* filler;
    const LockOwner* owner;
  };
  std::vector<Entry> entries;
};
ActiveRuns& active_runs() {
  thread_local ActiveRuns runs;
  return runs;
}

/// While a recompute is prepared on this thread: what the user's hooks, observers and providers
/// differentiate is no backward of a region that waits here.
thread_local bool is_preparing = false;

struct PreparingIs {
  explicit PreparingIs(bool now) : before(std::exchange(is_preparing, now)) {}
  ~PreparingIs() { is_preparing = before; }
  PreparingIs(const PreparingIs&) = delete;
  PreparingIs& operator=(const PreparingIs&) = delete;
  const bool before;
};

struct RunOnThisThread {
  RunOnThisThread(Frame& frame, Run& run, Filler& filler, const LockOwner* owner) {
    active_runs().entries.push_back({&frame, &run, &filler, owner});
  }
  ~RunOnThisThread() { active_runs().entries.pop_back(); }
};

/// The generators that a recompute may set, each as GeneratorSwap says. Puts back what early guards
/// guard, if that has not been done.
class SwapOfAll {
 public:
  explicit SwapOfAll(RecomputeScope& scope) : scope_(scope) {
    scope.visit_replays([this](const DrawReplay& each) {
      if (first_)
        more_.emplace_back(each);
      else
        first_.emplace(each);
    });
  }
  bool were_disturbed() const {
    return (first_ && first_->was_disturbed()) ||
           std::any_of(more_.begin(), more_.end(),
                       [](const GeneratorSwap& each) { return each.was_disturbed(); });
  }

  ~SwapOfAll() { scope_.put_back_early_guards(); }
  SwapOfAll(const SwapOfAll&) = delete;
  SwapOfAll& operator=(const SwapOfAll&) = delete;

 private:
  RecomputeScope& scope_;
  std::optional<GeneratorSwap> first_;
  std::list<GeneratorSwap> more_;
};

/// Runs the function again. Returns normally after a stop too; false if another thread disturbed
/// its random numbers.
bool run_again(const c10::intrusive_ptr<Frame>& frame, Run& run, Filler& filler,
               const std::shared_ptr<RecomputeScope>& scope, std::vector<at::Tensor>& inputs) {
  UserRestore user_state(frame->user_state(), *scope->lock_owner());
  if (user_state.has_failed())
    throw_recompute_failed(*frame, "a StateProvider did not become free within ten seconds",
                           "another thread recomputes a region that uses it too, and may be "
                           "waiting for this one",
                           "give each thread a provider of its own");
  const StreamScope streams(frame->streams(), inputs);
  const DeviceRngSwap device_rng(frame->device_states_at_begin(), *scope->lock_owner());
  if (device_rng.has_failed())
    throw_recompute_failed(*frame, "a device's generator did not become free within a minute",
                           "another thread's recompute draws from it too, and may be waiting for "
                           "this one",
                           "let one thread at a time run backward through regions that draw from "
                           "it, or set preserve_rng_state = false if other numbers do no harm");
  const SwapOfAll generators(*scope);
  {
    const PreparingIs over(false);
    // Not while a provider runs a backward.
    const RunOnThisThread active(*frame, run, filler, scope->lock_owner());
    AmbientRestore ambient(frame->snapshot());
    detail::StackSwap clean(scope);
    std::optional<seam::DispatchMode> sight;
    if (frame->sees_operators()) sight.emplace();
    OpLogScope logging(filler.log());
    OutsideTensors outside(*frame);
    scope->set_outside(&outside);
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
    user_scope.reset();
    scope->set_outside(nullptr);
    outside.finish();
    if (Replay* const replay = scope->replay()) replay->end();
    filler.finish();
    filler.record_ready();
  }
  scope->put_back_early_guards();
  user_state.put_back();
  return !generators.were_disturbed();
}

constexpr int max_attempts = 5;

/// One attempt; false if it was disturbed: nothing of it is kept.
bool try_recompute(const c10::intrusive_ptr<Frame>& frame, Run& run, int64_t only_position) {
  count(live_counters.recomputes);
  // What hooks, observers and providers of the user's do here is no part of a region that waits on this
  // thread. run_again() looks at operators if the frame does.
  const seam::DispatchModeOff unseen;
  const PreparingIs preparing(true);
  try {
    recording::RecomputeSpan span(*frame);
    const auto profiled = profiler::recompute_scope(*frame);
    const ObservedRecompute observed(frame->user_state(), frame->id(), frame->depth(),
                                     frame->name());
    GivenInputs given = frame->unpack_inputs();
    std::vector<at::Tensor>& inputs = given.tensors;
    Filler filler(*frame, run, only_position);
    filler.set_inputs(inputs);
    const auto scope = std::make_shared<RecomputeScope>(frame, filler);
    if (frame->has_noted_backwards()) scope->knows_inputs(inputs);
    if (frame->has_run_backward()) scope->begin_sinks();
    if (scope->uses_original() || frame->has_hook_after_backward()) filler.forbid_stop();
    if (frame->selection() != nullptr) {
      if (frame->selection()->rule() != nullptr) frame->selection()->rule()->warn_about_unseen();
      scope->begin_replay(inputs);
    }
    bool is_undisturbed = false;
    try {
      is_undisturbed = run_again(frame, run, filler, scope, inputs);
    } catch (const std::exception& error) {
      Replay* const replay = scope->replay();
      if (replay != nullptr && KeptTensor::is_placeholder_error(error))
        replay->note_read_placeholder();
      if (replay == nullptr || !replay->has_read_placeholder()) throw;
    } catch (...) {
      if (scope->replay() == nullptr || !scope->replay()->has_read_placeholder()) throw;
    }
    if (const Replay* const replay = scope->replay()) {
      if (replay->has_read_placeholder()) {
        frame->selection()->run_placeholders_for_real();
        is_undisturbed = false;
      } else {
        replay->rethrow_mismatch();
      }
    }
    if (!is_undisturbed) {
      run.clear();
      return false;
    }
    frame->inputs().check_unwritten(*frame, given);
    filler.rethrow_refusal();
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
    if (is_planted(Fault::SwappedSlots) && run.has(0) && run.has(1) &&
        run.peek(0).tensor.sizes().equals(run.peek(1).tensor.sizes()))
      std::swap(run.values[0], run.values[1]);
    span.ends(filler.has_stopped(), run.num_bytes());
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

namespace {

void tell_regions_of_backward(const torch::autograd::edge_list& roots,
                              const torch::autograd::edge_list& targets, bool accumulates) {
  const Frame* passed_over = nullptr;
  detail::visit(detail::Ability::Region, [&](detail::Scope& scope) {
    if (scope.is_save_region) passed_over = scope.frame();  // recomputes do not run what it runs
    if (scope.frame() == passed_over) return;
    scope.backward_begins(roots, targets, accumulates);
    if (Replay* const replay = scope.replay()) replay->check_backward(roots, targets);
  });
}

c10::SmallVector<const LockOwner*, 4> lock_owners_on_this_thread() {
  c10::SmallVector<const LockOwner*, 4> owners;
  for (const ActiveRuns::Entry& each : active_runs().entries) owners.push_back(each.owner);
  return owners;
}

}  // namespace

void backward_begins(const torch::autograd::edge_list& roots,
                     const torch::autograd::edge_list& targets, bool accumulates) {
  if (!active_runs().entries.empty()) {
    active_runs().entries.back().filler->stop_before_backward();
    for (const ActiveRuns::Entry& each : active_runs().entries)
      each.frame->owner_waits_for_backward(*each.run);
  }
  if (!is_preparing) tell_regions_of_backward(roots, targets, accumulates);
  const auto owners = lock_owners_on_this_thread();
  if (!owners.empty()) recompute_lock().yield_to_backward(owners);
}

void backward_ended(const torch::autograd::variable_list& gradients,
                    const torch::autograd::variable_list& given) {
  const auto owners = lock_owners_on_this_thread();
  if (!owners.empty()) recompute_lock().resume_after_backward(owners);
  if (gradients.empty()) return;
  detail::visit(detail::Ability::Region,
                [&](detail::Scope& scope) { scope.backward_ended(gradients, given); });
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
