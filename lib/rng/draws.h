#pragma once
// The random numbers of a region: noted while forward draws them, drawn again by its recomputes.
//
// Note [Draws]
// The default CPU generator is one for all threads. A recompute that set it would disturb every
// other thread that draws, and be disturbed by it, and no lock could prevent that. So recomputes
// leave it alone and draw from a generator of their own (DrawReplay), which needs to know where
// the forward's numbers came from. Random operators pass a kernel of ours below autograd (key
// BackendSelect; on threads that are in no region it only counts). In a region it runs the operator
// on a private copy of the default generator, while holding the default one's mutex, and then moves
// the default one to where the copy stands: the same numbers in the same order as without us, but
// where they start is certain. A region's DrawLog keeps the states from which its numbers did not
// simply follow on its own last ones: one for most regions, more if other threads drew in between.
//
// What passes no operator (a kernel that takes numbers from the default generator itself, a seed
// set inside the region) is seen because the generator is not where the last operator of any thread
// left it (DrawTrack). A region during which that happened is recomputed the old way: the default
// generator is set to where the region began, nothing is stopped early, and where it ends must be
// where it ended in forward; else another thread disturbed it, and it is tried again.
//
// Other generators are treated in the same way, as far as they are CPU generators, each with a log
// of its own: those that a GeneratorGuard registered, from where the region begins; what the
// function has from elsewhere (an argument, a capture, a member of its module), from its first draw
// on. What else the guard is given: lib/rng/device_rng.h.
//
// A thread that the function starts itself looks like a stranger. What it draws cannot be drawn
// again. So once a thread has drawn for the first time in its life during a region's forward, a
// hash is kept of each CPU tensor that is saved from there on, and the recompute must meet it.
// Threads that drew before, as data loaders do, raise no such suspicion.

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

/// What a recompute needs to know of the forward's draws.
struct DrawPlan {
  struct Jump {
    int64_t draw;  ///< number of the first operator that drew from here
    std::shared_ptr<const CpuRngState> state;
  };
  c10::SmallVector<Jump, 1> jumps;
  /// The generator stood here when the region began, if numbers passed no operator.
  std::shared_ptr<const CpuRngState> unseen_start;
  std::optional<CpuRngPosition> end;  ///< where it stood at the region's end, once that is known
  /// Operators of other threads drew meanwhile, so that numbers that passed none cannot come again.
  bool had_strangers = false;

  /// The recompute draws from the generator itself.
  bool uses_original() const { return unseen_start != nullptr; }
};

/// A track knows where the operators of all threads left one generator. The generator's mutex is
/// held.
class DrawTrack {
 public:
  explicit DrawTrack(at::CPUGeneratorImpl& followed_one);
  const at::CPUGeneratorImpl& generator() const { return generator_; }
  /// Notes whether something else has moved the generator since. Where it stands.
  const CpuRngPosition& look();
  /// We have moved it ourselves.
  void moved();
  /// The state it was seen in last; one copy for all who ask before it moves.
  const std::shared_ptr<const CpuRngState>& state();

  const bool is_default;    ///< the process's own
  uint64_t num_unseen = 0;  ///< times it was found elsewhere
  uint64_t num_draws = 0;   ///< operators

 private:
  at::CPUGeneratorImpl& generator_;
  std::optional<CpuRngPosition> known_at_{};
  std::shared_ptr<const CpuRngState> state_;
};

/// What an interval of a forward drew: a recompute that does not run the interval passes over it.
struct DrawSkip {
  int64_t num_draws = 0;
  std::shared_ptr<const CpuRngState> end{};  ///< of the generator itself, if the interval moved it
};
struct DrawMark {
  int64_t num_draws;
  CpuRngPosition position;
};

/// How a region draws from one generator during its forward. Threads: any.
class DrawLog {
 public:
  explicit DrawLog(at::CPUGeneratorImpl& generator);
  at::CPUGeneratorImpl& generator() const { return generator_; }
  /// The track follows the generator since the region began.
  const std::shared_ptr<DrawTrack>& track() const { return track_; }
  /// The region's function begins, or has returned, on this thread.
  void begin();
  void settle();
  DrawPlan plan();
  /// Returns the plan once it is settled, else null. Lives as long as the log.
  const DrawPlan* settled_plan() const {
    return is_settled_ ? (drawn_ == nullptr ? &no_draws : &drawn_->plan) : nullptr;
  }
  /// Around an interval that recomputes will not run. What is drawn next starts from a noted state.
  DrawMark mark();
  DrawSkip since(const DrawMark& mark);
  /// Does the same for an interval in which the log began.
  DrawSkip since_begin();
  /// Whether a thread that had never drawn before has drawn since the region began, outside of any
  /// region, or a thread other than the region's own in the region. Cheap.
  bool has_new_drawer() const;

  /// An operator of the region draws from `source`, whose mutex is held: the generator itself, or
  /// the replay of a recompute around the region.
  void draw_begins(at::CPUGeneratorImpl& source);
  void draw_ends(at::CPUGeneratorImpl& source);

 private:
  static const DrawPlan no_draws;
  /// What only regions that draw have.
  struct Drawn {
    DrawPlan plan;
    CpuRngPosition end_of_last{};  // of the source after the region's latest draw
    int64_t num_draws = 0, num_draws_from_original = 0;
    bool must_note_next = false;
  };
  // Holds the mutex, as those that follow do.
  Drawn& drawn();
  int64_t num_draws() const { return drawn_ == nullptr ? 0 : drawn_->num_draws; }
  void look_for_unseen();  // holds the generator's, too
  DrawSkip skip_since(int64_t num_draws_before, bool has_moved);

  at::CPUGeneratorImpl& generator_;
  std::thread::id thread_;
  uint64_t new_drawers_at_begin_ = 0, unseen_at_begin_ = 0, draws_at_begin_ = 0;
  std::shared_ptr<DrawTrack> track_;
  std::shared_ptr<const CpuRngState> start_;  // until it is settled
  std::unique_ptr<Drawn> drawn_;              // null before the first draw
  mutable SpinLock mutex_;                    // guards what stands above; taken after a generator's
  std::atomic<bool> is_settled_{false};
  std::atomic<bool> has_other_threads_{false};  // drew for the region: their order may differ
};

/// A replay has the generator of one recompute. The log outlives it.
class DrawReplay {
 public:
  explicit DrawReplay(DrawLog& forward)
      : original_(forward.generator()), track_(forward.track()), settled_(forward.settled_plan()) {
    if (settled_ == nullptr) plan_ = forward.plan();
  }
  /// Without a forward: draws from the generator itself, from where it stands.
  explicit DrawReplay(at::CPUGeneratorImpl& original);
  at::CPUGeneratorImpl& original() const { return original_; }
  const DrawPlan& plan() const { return settled_ != nullptr ? *settled_ : *plan_; }
  const std::shared_ptr<DrawTrack>& track() const { return track_; }

  /// Returns the generator for the next operator, standing where forward's stood. Hold `mutex`
  /// meanwhile.
  at::Generator& next();
  std::mutex mutex;
  /// The recompute passes over an interval of the forward.
  void skip(const DrawSkip& skipped);
  /// Operators of the recompute that drew from the original itself.
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

/// What a region's scope says of draws from a generator, for its run. Threads: any.
class DrawSource {
 public:
  /// A first run says where its draws are noted; null if they do not matter. Asked before each
  /// draw.
  virtual DrawLog* draw_log(const c10::GeneratorImpl&) { return nullptr; }
  /// A recompute says what draws them again.
  virtual DrawReplay* draw_replay(const c10::GeneratorImpl&) { return nullptr; }

 protected:
  ~DrawSource() = default;  // owned as something else
};

/// While alive, random operators of this thread, and those inside them, draw from `source` where
/// they would draw from `original`. Both outlive it.
class DrawsFrom {
 public:
  DrawsFrom(at::Generator& source, const at::CPUGeneratorImpl& original);
  ~DrawsFrom();
  DrawsFrom& operator=(DrawsFrom&&) = delete;
  /// The innermost of this thread, or null.
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

/// While alive, notes where the first random operator of this thread finds a generator. The state
/// is taken under the generator's mutex, so that draws of other threads do not matter.
class NoteDraw {
 public:
  explicit NoteDraw(const at::CPUGeneratorImpl& generator);
  ~NoteDraw();
  NoteDraw& operator=(NoteDraw&&) = delete;
  /// Returns null if no operator has drawn.
  const std::shared_ptr<const CpuRngState>& state() const { return state_; }

  /// Returns the innermost of this thread, if it is for that generator; or null.
  static NoteDraw* of(const at::CPUGeneratorImpl& generator);
  /// The caller holds the generator's mutex.
  void draw_begins(DrawTrack& track);

 private:
  const at::CPUGeneratorImpl& generator_;
  std::shared_ptr<const CpuRngState> state_;
  NoteDraw* const outer_;
  static thread_local NoteDraw* now_;
};

/// While alive the generator itself stands where the region began, if the replay's plan uses it;
/// then again where it was, also if the function seeded it. Waits a bounded time for other swaps.
class GeneratorSwap {
 public:
  explicit GeneratorSwap(const DrawReplay& replay);
  ~GeneratorSwap();
  GeneratorSwap& operator=(GeneratorSwap&&) = delete;
  /// Whether the numbers drawn so far, all of the function's, cannot be those of the forward.
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

/// While alive, draws of this thread from the default CPU generator are nobody's, and
/// afterwards it stands where it stood: regions around do not see them. Other threads must not
/// draw meanwhile.
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
