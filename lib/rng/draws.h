#pragma once
// The random numbers of a region: noted while forward draws them, drawn again by its recomputes.
//
// Note [Draws]
// The default CPU generator is one for all threads. A recompute that set it would disturb every
// other thread that draws, and be disturbed by it, and no lock could prevent that. So recomputes
// leave it alone and draw from a generator of their own (DrawReplay), which needs the states from
// which forward drew.
//
// Random operators pass a kernel of ours below autograd (key BackendSelect; outside regions it only
// counts). In a region it runs the operator on a private copy of the default generator, while
// holding the default one's mutex, and then moves the default one to the copy's position. Numbers
// and order are the same as without us, but their start is certain. A region's DrawLog holds the
// states at which its numbers did not simply continue its own last ones: one state for most
// regions, more if other threads drew in between.
//
// Some numbers pass no operator: a kernel takes them from the default generator itself, or a seed
// is set inside the region. They are detected because the generator is not at the position where
// the last operator of any thread left it (DrawTrack). A region during which that happened is
// recomputed differently: the default generator is set to its state at the region's begin, and
// nothing is stopped early. It must end at the position of forward's end; otherwise another thread
// disturbed it, and the recompute is tried again.
//
// Other CPU generators are treated in the same way, each with a log of its own. A generator
// registered by a GeneratorGuard has one from the region's begin. Any other generator that the
// function uses (from an argument, a capture, a member of its module) has one from its first draw.
// Other kinds of generators in a guard: lib/rng/device_rng.h.
//
// A thread that the function starts itself looks like any other thread, and its draws cannot be
// repeated. So if a thread draws for the first time in its life during a region's forward, the hash
// of each CPU tensor saved from there on is noted, and the recompute must reproduce it. Threads
// that drew before, as data loaders do, cause no such hashes.

#include <ATen/core/Generator.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "lib/base/recompute_lock.h"
#include "lib/base/spin_lock.h"
#include "lib/seam/cpu_generator.h"

namespace remat {

/// The forward's draws, as a recompute needs them.
struct DrawPlan {
  struct Jump {
    int64_t draw;  ///< number of the first operator that drew from here
    std::shared_ptr<const CpuRngState> state;
  };
  c10::SmallVector<Jump, 1> jumps;
  /// The generator's state at the region's begin, if numbers passed no operator.
  std::shared_ptr<const CpuRngState> unseen_start;
  std::optional<CpuRngPosition> end;  ///< its position at the region's end, once known
  /// True if operators of other threads drew meanwhile, so that numbers that passed no operator
  /// cannot be repeated.
  bool had_strangers = false;

  /// Returns whether the recompute draws from the generator itself.
  bool uses_original() const { return unseen_start != nullptr; }
};

/// Tracks the position at which the operators of all threads left one generator. Hold the
/// generator's mutex.
class DrawTrack {
 public:
  explicit DrawTrack(at::CPUGeneratorImpl& followed_one);
  const at::CPUGeneratorImpl& generator() const { return generator_; }
  /// Notes whether something else has moved the generator since. Returns its position.
  const CpuRngPosition& look();
  /// Notes that we have moved it ourselves.
  void moved();
  /// Returns the state in which it was last seen; callers share one copy until it moves.
  const std::shared_ptr<const CpuRngState>& state();

  const bool is_default;    ///< whether it is the process's default one
  uint64_t num_unseen = 0;  ///< times it was found moved
  uint64_t num_draws = 0;   ///< by operators

 private:
  at::CPUGeneratorImpl& generator_;
  std::optional<CpuRngPosition> known_at_{};
  std::shared_ptr<const CpuRngState> state_;
};

/// The draws of an interval of a forward. A recompute that does not run the interval skips them.
struct DrawSkip {
  int64_t num_draws = 0;
  std::shared_ptr<const CpuRngState> end{};  ///< of the generator itself, if the interval moved it
};
struct DrawMark {
  int64_t num_draws;
  CpuRngPosition position;
};

/// The draws of a region from one generator during its forward. Threads: any.
class DrawLog {
 public:
  explicit DrawLog(at::CPUGeneratorImpl& generator);
  at::CPUGeneratorImpl& generator() const { return generator_; }
  /// Returns the track, which follows the generator since the region began.
  const std::shared_ptr<DrawTrack>& track() const { return track_; }
  /// Called when the region's function begins, and has returned, on this thread.
  void begin();
  void settle();
  DrawPlan plan();
  /// Returns the plan once it is settled, otherwise null. Lives as long as the log.
  const DrawPlan* settled_plan() const {
    return is_settled_ ? (drawn_ == nullptr ? &no_draws : &drawn_->plan) : nullptr;
  }
  /// Marks the begin and end of an interval that recomputes will not run. The next draw starts from
  /// a noted state.
  DrawMark mark();
  DrawSkip since(const DrawMark& mark);
  /// Ends an interval in which the log began.
  DrawSkip since_begin();
  /// Returns whether a thread drew for the first time since the region began, outside of any
  /// region, or a thread other than the region's own drew in the region. Cheap.
  bool has_new_drawer() const;

  /// Called when an operator of the region draws from `source`, whose mutex is held: the generator
  /// itself, or the replay of a recompute around the region.
  void draw_begins(at::CPUGeneratorImpl& source);
  void draw_ends(at::CPUGeneratorImpl& source);

 private:
  static const DrawPlan no_draws;
  /// Data of regions that draw.
  struct Drawn {
    DrawPlan plan;
    CpuRngPosition end_of_last{};  // of the source after the region's latest draw
    int64_t num_draws = 0, num_draws_from_original = 0;
    bool must_note_next = false;
  };
  // Called with the mutex held, like the functions below.
  Drawn& drawn();
  int64_t num_draws() const { return drawn_ == nullptr ? 0 : drawn_->num_draws; }
  void look_for_unseen();  // with the generator's mutex held, too
  DrawSkip skip_since(int64_t num_draws_before, bool has_moved);

  at::CPUGeneratorImpl& generator_;
  std::thread::id thread_;
  uint64_t new_drawers_at_begin_ = 0, unseen_at_begin_ = 0, draws_at_begin_ = 0;
  std::shared_ptr<DrawTrack> track_;
  std::shared_ptr<const CpuRngState> start_;  // until the log is settled
  std::unique_ptr<Drawn> drawn_;              // null before the first draw
  mutable SpinLock mutex_;                    // guards the above; taken after a generator's
  std::atomic<bool> is_settled_{false};
  std::atomic<bool> has_other_threads_{false};  // drew for the region, in an order that may differ
};

/// The generator of one recompute. The log must outlive it.
class DrawReplay {
 public:
  explicit DrawReplay(DrawLog& forward)
      : original_(forward.generator()), track_(forward.track()), settled_(forward.settled_plan()) {
    if (settled_ == nullptr) plan_ = forward.plan();
  }
  /// Makes a replay without a forward: draws from the generator itself, from its present position.
  explicit DrawReplay(at::CPUGeneratorImpl& original);
  at::CPUGeneratorImpl& original() const { return original_; }
  const DrawPlan& plan() const { return settled_ != nullptr ? *settled_ : *plan_; }
  const std::shared_ptr<DrawTrack>& track() const { return track_; }

  /// Returns the generator for the next operator, at forward's position. Hold `mutex` meanwhile.
  at::Generator& next();
  std::mutex mutex;
  /// Skips an interval of the forward.
  void skip(const DrawSkip& skipped);
  /// The number of the recompute's operators that drew from the original itself.
  std::atomic<uint64_t> num_original_draws{0};

 private:
  at::CPUGeneratorImpl& original_;
  const std::shared_ptr<DrawTrack> track_;
  const DrawPlan* const settled_;  // of the log; or:
  std::optional<DrawPlan> plan_;
  at::Generator generator_;
  int64_t num_draws_ = 0;
  std::size_t next_jump_ = 0;
};

/// A region scope's answers about draws from a generator, for its run. Threads: any.
class DrawSource {
 public:
  /// Returns the log of a first run's draws; null if they do not matter. Called before each draw.
  virtual DrawLog* draw_log(const c10::GeneratorImpl&) { return nullptr; }
  /// Returns the replay of a recompute's draws, or null.
  virtual DrawReplay* draw_replay(const c10::GeneratorImpl&) { return nullptr; }

 protected:
  ~DrawSource() = default;  // owned as something else
};

/// Makes random operators of this thread, and those inside them, draw from `source` instead of
/// `original` while alive. Both must outlive it.
class DrawsFrom {
 public:
  DrawsFrom(at::Generator& source, const at::CPUGeneratorImpl& original);
  ~DrawsFrom();
  DrawsFrom& operator=(DrawsFrom&&) = delete;
  /// Returns the innermost of this thread, or null.
  static const DrawsFrom* now() { return now_; }
  at::Generator& source() const { return source_; }
  bool is_in_place_of(const at::CPUGeneratorImpl& generator) const {
    return &generator == &original_;
  }

 private:
  at::Generator& source_;
  const at::CPUGeneratorImpl& original_;
  const DrawsFrom* const outer_;
  static thread_local const DrawsFrom* now_;
};

/// Notes the state in which the first random operator of this thread finds a generator, while
/// alive. The state is taken under the generator's mutex, so draws of other threads do not matter.
class NoteDraw {
 public:
  explicit NoteDraw(const at::CPUGeneratorImpl& generator);
  ~NoteDraw();
  NoteDraw& operator=(NoteDraw&&) = delete;
  /// Returns null if no operator has drawn.
  const std::shared_ptr<const CpuRngState>& state() const { return state_; }

  /// Returns the innermost of this thread, if it is for that generator; or null.
  static NoteDraw* of(const at::CPUGeneratorImpl& generator);
  /// Notes the state before a draw. The caller holds the generator's mutex.
  void draw_begins(DrawTrack& track);

 private:
  const at::CPUGeneratorImpl& generator_;
  std::shared_ptr<const CpuRngState> state_;
  NoteDraw* const outer_;
  static thread_local NoteDraw* now_;
};

/// Sets the generator itself to its state at the region's begin while alive, if the replay's plan
/// uses it. Restores the previous state afterwards, even if the function seeded it. Waits a bounded
/// time for other swaps.
class GeneratorSwap {
 public:
  explicit GeneratorSwap(const DrawReplay& replay);
  ~GeneratorSwap();
  GeneratorSwap& operator=(GeneratorSwap&&) = delete;
  /// Returns whether the numbers drawn so far, when the function has drawn all, cannot be those of
  /// the forward.
  bool was_disturbed() const;

 private:
  void set_state_known(const CpuRngState& state);

  const DrawReplay& replay_;
  at::CPUGeneratorImpl& generator_;
  const DrawPlan& plan_;
  DrawTrack* const track_;  // of the replay
  std::shared_ptr<const CpuRngState> before_;
  uint64_t num_unseen_ = 0, num_draws_ = 0;
  std::optional<RecomputeHold> turn_;
};

/// Undoes draws of this thread from the default CPU generator at the end of its lifetime: regions
/// around do not see them. Other threads must not draw meanwhile.
class UndoneDraws {
 public:
  UndoneDraws();
  ~UndoneDraws();
  UndoneDraws& operator=(UndoneDraws&&) = delete;

 private:
  DrawTrack& track_;
  std::shared_ptr<const CpuRngState> before_;
  uint64_t num_draws_ = 0;
};

}  // namespace remat
