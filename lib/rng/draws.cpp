#include "lib/rng/draws.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <unordered_map>
#include <utility>

#include "lib/base/planted_fault.h"
#include "lib/scope/region_scope.h"

namespace remat {

namespace {

/// The generators whose draws are followed: the default one, and registered ones while they have a
/// log.
struct Followed {
  std::mutex mutex;
  std::unordered_map<const at::CPUGeneratorImpl*, std::weak_ptr<DrawTrack>> tracks;
  std::atomic<int64_t> size{0};  // without the default one
};
Followed& followed() {
  static auto* const all = new Followed;  // leaked: frames may die in static destructors
  return *all;
}

/// Returns a pointer without an owner: the track is leaked, too, and its references are not
/// counted.
std::shared_ptr<DrawTrack> default_track() {
  static auto* const track = new DrawTrack(default_cpu_generator());
  return {std::shared_ptr<void>(), track};
}

/// Returns the track of a generator, and makes it if needed.
std::shared_ptr<DrawTrack> follow(at::CPUGeneratorImpl& generator) {
  if (&generator == &default_cpu_generator()) return default_track();
  std::lock_guard<std::mutex> lock(followed().mutex);
  std::erase_if(followed().tracks, [](const auto& each) { return each.second.expired(); });
  auto& place = followed().tracks[&generator];
  auto track = place.lock();
  if (track == nullptr) place = track = std::make_shared<DrawTrack>(generator);
  followed().size = static_cast<int64_t>(followed().tracks.size());
  return track;
}

/// Returns the track of a generator, or null if it is not followed. Cheap.
std::shared_ptr<DrawTrack> track_of(const at::CPUGeneratorImpl& generator) {
  if (&generator == &default_cpu_generator()) return default_track();
  if (followed().size == 0) return nullptr;
  std::lock_guard<std::mutex> lock(followed().mutex);
  const auto found = followed().tracks.find(&generator);
  return found == followed().tracks.end() ? nullptr : found->second.lock();
}

/// The number of threads that have drawn for the first time.
std::atomic<uint64_t> num_new_drawers{0};
thread_local bool has_drawn = false;

/// Returns the number of draws on this thread after which the generator was restored, and which do
/// not count.
uint64_t& undone_draws(const DrawTrack& track) {
  thread_local uint64_t of_default = 0;
  if (track.is_default) return of_default;
  thread_local std::unordered_map<const at::CPUGeneratorImpl*, uint64_t> by_generator;
  return by_generator[&track.generator()];
}

/// Returns the number of operators so far that drew from a track's generator, as a region on this
/// thread counts them.
uint64_t lasting_draws(const DrawTrack& track) { return track.num_draws - undone_draws(track); }

/// The regions around a random operator, and the recompute to which it belongs.
struct Regions {
  c10::SmallVector<DrawLog*, 4> logs;
  DrawReplay* replay = nullptr;
  DrawReplay* original = nullptr;  // of a recompute that draws from the generator itself

  static Regions around(const at::CPUGeneratorImpl& generator) {
    Regions regions;
    detail::visit_regions([&](detail::RegionScope& scope) {
      if (is_planted(Fault::NestedDraws) && !regions.logs.empty()) return;
      DrawSource* const draws = scope.draws();
      if (draws == nullptr) return;
      if (DrawLog* const log = draws->draw_log(generator)) regions.logs.push_back(log);
      DrawReplay* const replay = draws->draw_replay(generator);
      if (replay != nullptr)
        (replay->plan().uses_original() ? regions.original : regions.replay) = replay;
    });
    if (is_planted(Fault::RandomNumbers)) regions.replay = nullptr;
    return regions;
  }

  void begin(at::CPUGeneratorImpl& source) const {
    for (DrawLog* log : logs) log->draw_begins(source);
  }
  void end(at::CPUGeneratorImpl& source) const {
    for (DrawLog* log : logs) log->draw_ends(source);
  }
};

at::CPUGeneratorImpl& impl_of(at::Generator& generator) {
  return *generator.get<at::CPUGeneratorImpl>();
}

struct DrawCall {
  c10::IValue* argument = nullptr;
  at::CPUGeneratorImpl* generator = nullptr;  ///< that the operator draws from; null for no CPU one
};

DrawCall call_on(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  c10::IValue* const first = &stack[stack.size() - arguments.size()];
  DrawCall call;
  const at::Tensor* tensor = nullptr;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (tensor == nullptr && first[i].isTensor() && first[i].toTensor().defined())
      tensor = &first[i].toTensor();
    if (arguments[i].name() == "generator") call.argument = first + i;
  }
  if (call.argument == nullptr || tensor == nullptr || !tensor->is_cpu()) return call;
  if (call.argument->isNone()) {
    call.generator = &default_cpu_generator();
  } else if (call.argument->isGenerator()) {
    const at::Generator given = call.argument->toGenerator();
    call.generator = given.defined() ? as_cpu_generator(given) : &default_cpu_generator();
  }
  return call;
}

/// See Note [Draws].
void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  const DrawCall call = call_on(op, *stack);
  if (call.generator == nullptr) return op.redispatchBoxed(below, stack);
  at::CPUGeneratorImpl& original = *call.generator;
  if (const DrawsFrom* const instead = DrawsFrom::now()) {
    if (instead->is_in_place_of(original)) *call.argument = instead->source();
    return op.redispatchBoxed(below, stack);
  }
  const auto run_with = [&](at::Generator& source) {
    const DrawsFrom instead(source, original);
    *call.argument = source;
    op.redispatchBoxed(below, stack);
  };
  const Regions regions = Regions::around(original);
  if (regions.replay != nullptr) {
    std::lock_guard<std::mutex> lock(regions.replay->mutex);
    at::Generator& source = regions.replay->next();
    regions.begin(impl_of(source));
    run_with(source);
    regions.end(impl_of(source));
    return;
  }
  std::shared_ptr<DrawTrack> track = track_of(original);
  NoteDraw* const note = NoteDraw::of(original);
  if (track == nullptr && note == nullptr) return op.redispatchBoxed(below, stack);
  if (track == nullptr) track = std::make_shared<DrawTrack>(original);
  if (!std::exchange(has_drawn, true) && regions.logs.empty()) ++num_new_drawers;
  thread_local at::Generator copy = at::make_generator<at::CPUGeneratorImpl>();
  std::lock_guard<std::mutex> lock(original.mutex_);
  track->look();
  if (note != nullptr) note->draw_begins(*track);
  ++track->num_draws;
  if (regions.original != nullptr) ++regions.original->num_original_draws;
  regions.begin(original);
  copy_state(original, impl_of(copy));
  struct MoveOn {  // also if the operator throws: it may have drawn
    at::CPUGeneratorImpl &from, &to;
    DrawTrack& track;
    ~MoveOn() {
      copy_state(from, to);
      track.moved();
    }
  };
  {
    const MoveOn move_on{impl_of(copy), original, *track};
    run_with(copy);
  }
  regions.end(original);
}

/// Registers `draw` below autograd for every random operator with a tensor argument, when the
/// library is loaded. An operator that already has a kernel there (of another copy of this library)
/// is left alone: its draws are unseen ones to us.
struct Interception {
  Interception() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != "aten") continue;
      const auto op = dispatcher.findSchema(name);
      if (!op || !draws(op->schema()) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect) ||
          op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
        continue;
      std::string full = name.name;
      if (!name.overload_name.empty()) full += "." + name.overload_name;
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw>());
    }
  }

  static bool draws(const c10::FunctionSchema& schema) {
    bool has_tensor = false, has_generator = false;
    for (const c10::Argument& argument : schema.arguments()) {
      has_tensor = has_tensor || argument.type()->kind() == c10::TypeKind::TensorType;
      has_generator = has_generator || argument.name() == "generator";
    }
    return has_tensor && has_generator;
  }

  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__,
                         __LINE__};
};
const Interception interception;

}  // namespace

thread_local const DrawsFrom* DrawsFrom::now_ = nullptr;
thread_local NoteDraw* NoteDraw::now_ = nullptr;

NoteDraw::NoteDraw(const at::CPUGeneratorImpl& generator)
    : generator_(generator), outer_(std::exchange(now_, this)) {}
NoteDraw::~NoteDraw() { now_ = outer_; }

NoteDraw* NoteDraw::of(const at::CPUGeneratorImpl& generator) {
  return now_ != nullptr && &now_->generator_ == &generator ? now_ : nullptr;
}

void NoteDraw::draw_begins(DrawTrack& track) {
  if (state_ == nullptr) state_ = track.state();
}

DrawsFrom::DrawsFrom(at::Generator& source, const at::CPUGeneratorImpl& original)
    : source_(source), original_(original), outer_(std::exchange(now_, this)) {}
DrawsFrom::~DrawsFrom() { now_ = outer_; }

DrawTrack::DrawTrack(at::CPUGeneratorImpl& followed_one)
    : is_default(&followed_one == &default_cpu_generator()), generator_(followed_one) {}

const CpuRngPosition& DrawTrack::look() {
  if (known_at_ && is_at(generator_, *known_at_)) return *known_at_;
  if (known_at_) ++num_unseen;
  state_.reset();
  return known_at_.emplace(position_of(generator_));
}

void DrawTrack::moved() {
  known_at_ = position_of(generator_);
  state_.reset();
}

const std::shared_ptr<const CpuRngState>& DrawTrack::state() {
  if (state_ == nullptr) state_ = state_of(generator_);
  return state_;
}

DrawLog::DrawLog(at::CPUGeneratorImpl& generator) : generator_(generator) {}

void DrawLog::begin() {
  thread_ = std::this_thread::get_id();
  new_drawers_at_begin_ = num_new_drawers.load();
  track_ = follow(generator_);
  std::lock_guard<std::mutex> lock(generator_.mutex_);
  track_->look();
  unseen_at_begin_ = track_->num_unseen;
  draws_at_begin_ = lasting_draws(*track_);
  start_ = track_->state();
}

bool DrawLog::has_new_drawer() const {
  return has_other_threads_ || num_new_drawers.load() != new_drawers_at_begin_;
}

const DrawPlan DrawLog::no_draws;

DrawLog::Drawn& DrawLog::drawn() {
  if (drawn_ == nullptr) drawn_ = std::make_unique<Drawn>();
  return *drawn_;
}

void DrawLog::look_for_unseen() {
  track_->look();
  if (track_->num_unseen != unseen_at_begin_) drawn().plan.unseen_start = start_;
}

void DrawLog::draw_begins(at::CPUGeneratorImpl& source) {
  std::lock_guard<SpinLock> lock(mutex_);
  if (is_settled_) return;
  Drawn& so_far = drawn();
  if (&source == &generator_) {
    look_for_unseen();
    ++so_far.num_draws_from_original;
  }
  if (std::this_thread::get_id() != thread_) has_other_threads_ = true;
  if (so_far.num_draws == 0 || std::exchange(so_far.must_note_next, false) ||
      position_of(source) != so_far.end_of_last)
    so_far.plan.jumps.push_back({so_far.num_draws, state_of(source)});
  ++so_far.num_draws;
}

void DrawLog::draw_ends(at::CPUGeneratorImpl& source) {
  std::lock_guard<SpinLock> lock(mutex_);
  if (drawn_ != nullptr) drawn_->end_of_last = position_of(source);
}

DrawMark DrawLog::mark() {
  std::lock_guard<std::mutex> generator_lock(generator_.mutex_);
  std::lock_guard<SpinLock> lock(mutex_);
  return {num_draws(), position_of(generator_)};
}

DrawSkip DrawLog::since(const DrawMark& mark) {
  std::lock_guard<std::mutex> generator_lock(generator_.mutex_);
  std::lock_guard<SpinLock> lock(mutex_);
  return skip_since(mark.num_draws, position_of(generator_) != mark.position);
}

DrawSkip DrawLog::since_begin() {
  std::lock_guard<std::mutex> generator_lock(generator_.mutex_);
  std::lock_guard<SpinLock> lock(mutex_);
  return skip_since(0, start_ != nullptr && !is_at(generator_, *start_));
}

DrawSkip DrawLog::skip_since(int64_t num_draws_before, bool has_moved) {
  DrawSkip skipped{num_draws() - num_draws_before};
  if (!is_settled_) look_for_unseen();
  if (has_moved) skipped.end = track_->state();
  if (skipped.num_draws > 0) drawn().must_note_next = true;
  return skipped;
}

DrawPlan DrawLog::plan() {
  if (const DrawPlan* const settled = settled_plan()) return *settled;
  std::lock_guard<std::mutex> generator_lock(generator_.mutex_);
  std::lock_guard<SpinLock> lock(mutex_);
  if (!is_settled_) look_for_unseen();
  return drawn_ == nullptr ? no_draws : drawn_->plan;
}

void DrawLog::settle() {
  std::lock_guard<std::mutex> generator_lock(generator_.mutex_);
  std::lock_guard<SpinLock> lock(mutex_);
  look_for_unseen();
  if (drawn_ != nullptr && drawn_->plan.uses_original()) {
    drawn_->plan.end = position_of(generator_);
    drawn_->plan.had_strangers = lasting_draws(*track_) - draws_at_begin_ !=
                                 static_cast<uint64_t>(drawn_->num_draws_from_original);
  }
  start_.reset();
  is_settled_ = true;
}

DrawReplay::DrawReplay(at::CPUGeneratorImpl& original)
    : original_(original), track_(follow(original)), settled_(nullptr), plan_(DrawPlan()) {
  std::lock_guard<std::mutex> lock(original.mutex_);
  plan_->unseen_start = state_of(original);
}

at::Generator& DrawReplay::next() {
  if (!generator_.defined()) {
    generator_ = at::make_generator<at::CPUGeneratorImpl>();
    if (plan().jumps.empty()) {  // forward drew nothing: any numbers will do
      std::lock_guard<std::mutex> lock(original_.mutex_);
      copy_state(original_, impl_of(generator_));
    }
  }
  if (next_jump_ < plan().jumps.size() && plan().jumps[next_jump_].draw == num_draws_)
    set_state(impl_of(generator_), *plan().jumps[next_jump_++].state);
  ++num_draws_;
  return generator_;
}

void DrawReplay::skip(const DrawSkip& skipped) {
  if (plan().uses_original()) {
    if (skipped.end == nullptr) return;
    std::lock_guard<std::mutex> lock(original_.mutex_);
    set_state(original_, *skipped.end);
    track_->moved();
    return;
  }
  std::lock_guard<std::mutex> lock(mutex);
  num_draws_ += skipped.num_draws;
  while (next_jump_ < plan().jumps.size() && plan().jumps[next_jump_].draw < num_draws_)
    ++next_jump_;
}

namespace {
/// Swaps of all threads and generators take turns. This owner never yields, so a waiting thread
/// soon continues without a turn.
constexpr LockOwner turn_at_generators;
}  // namespace

GeneratorSwap::GeneratorSwap(const DrawReplay& replay)
    : replay_(replay),
      generator_(replay.original()),
      plan_(replay.plan()),
      track_(replay.track().get()) {
  if (plan_.uses_original())
    turn_.emplace(std::vector<const void*>{&turn_at_generators}, turn_at_generators,
                  std::chrono::milliseconds(20));
  std::lock_guard<std::mutex> lock(generator_.mutex_);
  track_->look();
  num_unseen_ = track_->num_unseen;
  num_draws_ = lasting_draws(*track_);
  before_ = track_->state();
  if (plan_.uses_original()) set_state_known(*plan_.unseen_start);
}

void GeneratorSwap::set_state_known(const CpuRngState& state) {
  set_state(generator_, state);
  track_->moved();
}

// A recompute that draws from its own generator may still seed the generator itself. That is
// undone, unless other threads' operators have drawn from it since.
GeneratorSwap::~GeneratorSwap() {
  std::lock_guard<std::mutex> lock(generator_.mutex_);
  track_->look();
  if (plan_.uses_original() ||
      (track_->num_unseen != num_unseen_ && lasting_draws(*track_) == num_draws_))
    set_state_known(*before_);
  if (plan_.uses_original()) undone_draws(*track_) += replay_.num_original_draws;
}

bool GeneratorSwap::was_disturbed() const {
  if (!plan_.uses_original() || !plan_.end) return false;
  std::lock_guard<std::mutex> lock(generator_.mutex_);
  // A recompute that does not move the generator draws no unseen numbers: then another thread moved
  // it in forward.
  const bool had_strangers =
      plan_.had_strangers || lasting_draws(*track_) - num_draws_ != replay_.num_original_draws;
  return (had_strangers || position_of(generator_) != *plan_.end) &&
         !is_at(generator_, *plan_.unseen_start);
}

UndoneDraws::UndoneDraws() : track_(*default_track()) {
  std::lock_guard<std::mutex> lock(default_cpu_generator().mutex_);
  track_.look();
  before_ = track_.state();
  num_draws_ = lasting_draws(track_);
}

UndoneDraws::~UndoneDraws() {
  std::lock_guard<std::mutex> lock(default_cpu_generator().mutex_);
  track_.look();  // numbers that passed no operator remain noted
  set_state(default_cpu_generator(), *before_);
  track_.moved();
  undone_draws(track_) += lasting_draws(track_) - num_draws_;
}

}  // namespace remat
