#include "lib/draws.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "lib/hook_stack.h"

namespace remat {

namespace {

/// Operators that drew, or are about to draw, from the default generator, on any thread.
std::atomic<uint64_t> num_begun{0}, num_ended{0};
/// Of these, the ones of this thread.
thread_local uint64_t num_own = 0;

/// What the random operator that this thread runs draws from; operators inside it do so too.
thread_local at::Generator* current_source = nullptr;

struct CountedDraw {
  CountedDraw() {
    num_begun.fetch_add(1);
    ++num_own;
  }
  ~CountedDraw() { num_ended.fetch_add(1); }
};

struct SourceScope {
  explicit SourceScope(at::Generator& source) : outer(std::exchange(current_source, &source)) {}
  ~SourceScope() { current_source = outer; }
  at::Generator* const outer;
};

/// The regions around a random operator, and the recompute it belongs to.
struct Regions {
  c10::SmallVector<DrawLog*, 4> logs;
  DrawReplay* replay = nullptr;

  static Regions here() {
    Regions regions;
    detail::visit_regions([&regions](detail::Scope& scope) {
      if (DrawLog* log = scope.draw_log()) regions.logs.push_back(log);
      if (DrawReplay* replay = scope.draw_replay();
          replay != nullptr && !replay->plan().uses_default())
        regions.replay = replay;
    });
    return regions;
  }

  void begin(at::CPUGeneratorImpl& source) const {
    for (DrawLog* log : logs) log->draw_begins(source, replay == nullptr);
  }
  void end(at::CPUGeneratorImpl& source) const {
    for (DrawLog* log : logs) log->draw_ends(source, replay == nullptr);
  }
};

at::CPUGeneratorImpl& impl_of(at::Generator& generator) {
  return *generator.get<at::CPUGeneratorImpl>();
}

/// The generator argument, if the operator draws from the default CPU generator; else null.
c10::IValue* default_generator_argument(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& arguments = op.schema().arguments();
  c10::IValue* const first = &stack[stack.size() - arguments.size()];
  c10::IValue* generator = nullptr;
  bool is_on_cpu = false, has_tensor = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (first[i].isTensor() && !has_tensor) {
      const at::Tensor& tensor = first[i].toTensor();
      has_tensor = tensor.defined();
      is_on_cpu = has_tensor && tensor.is_cpu();
    }
    if (arguments[i].name() == "generator") generator = first + i;
  }
  if (generator == nullptr || !is_on_cpu) return nullptr;
  const bool is_default =
      generator->isNone() ||
      (generator->isGenerator() &&
       generator->toGenerator().unsafeGetGeneratorImpl() == &default_cpu_generator());
  return is_default ? generator : nullptr;
}

/// See Note [Draws].
void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::DispatchKeySet below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
  c10::IValue* const generator = default_generator_argument(op, *stack);
  if (generator == nullptr) return op.redispatchBoxed(below, stack);
  if (current_source != nullptr) {
    *generator = *current_source;
    return op.redispatchBoxed(below, stack);
  }
  const auto run_with = [&](at::Generator& source) {
    SourceScope scope(source);
    *generator = source;
    op.redispatchBoxed(below, stack);
  };
  const Regions regions = Regions::here();
  if (regions.replay != nullptr) {
    std::lock_guard<std::mutex> lock(regions.replay->mutex);
    at::Generator& source = regions.replay->next();
    regions.begin(impl_of(source));
    run_with(source);
    regions.end(impl_of(source));
    return;
  }
  const CountedDraw counted;
  if (regions.logs.empty()) return op.redispatchBoxed(below, stack);

  thread_local at::Generator copy = at::make_generator<at::CPUGeneratorImpl>();
  at::CPUGeneratorImpl& source = default_cpu_generator();
  std::lock_guard<std::mutex> lock(source.mutex_);
  regions.begin(source);
  copy_state(source, impl_of(copy));
  struct MoveOn {  // also if the operator throws: it may have drawn
    at::CPUGeneratorImpl &from, &to;
    ~MoveOn() { copy_state(from, to); }
  };
  {
    const MoveOn move_on{impl_of(copy), source};
    run_with(copy);
  }
  regions.end(source);
}

/// Puts `draw` below autograd for every random operator with a tensor argument, when the library is
/// loaded. One that has a kernel there already (of another copy of this library) is left alone:
/// its draws are unseen ones to us.
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

void DrawLog::begin() {
  thread_ = std::this_thread::get_id();
  others_at_begin_ = num_ended.load() - num_own;
  at::CPUGeneratorImpl& source = default_cpu_generator();
  std::lock_guard<std::mutex> lock(source.mutex_);
  start_ = share_state(source);
  seed_ = seed_of(source);
}

bool DrawLog::have_others_drawn() const {
  return has_other_threads_ || std::this_thread::get_id() != thread_ ||
         num_begun.load() - num_own != others_at_begin_;
}

void DrawLog::look_at_default() {
  at::CPUGeneratorImpl& source = default_cpu_generator();
  const bool has_moved =
      default_at_ ? position_of(source) != *default_at_ : !is_at(source, *start_);
  if (!has_moved) return;
  if (seed_of(source) != seed_ || !have_others_drawn()) plan_.unseen_start = start_;
}

void DrawLog::draw_begins(at::CPUGeneratorImpl& source, bool is_default) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_settled_) return;
  if (is_default) look_at_default();
  if (std::this_thread::get_id() != thread_) has_other_threads_ = true;
  if (num_draws_ == 0 || position_of(source) != end_of_last_)
    plan_.jumps.push_back({num_draws_, share_state(source)});
  ++num_draws_;
}

void DrawLog::draw_ends(at::CPUGeneratorImpl& source, bool is_default) {
  std::lock_guard<std::mutex> lock(mutex_);
  end_of_last_ = position_of(source);
  if (is_default) default_at_ = end_of_last_;
}

DrawPlan DrawLog::plan() {
  at::CPUGeneratorImpl& source = default_cpu_generator();
  if (is_settled_) return plan_;
  std::lock_guard<std::mutex> source_lock(source.mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  look_at_default();
  return plan_;
}

void DrawLog::settle() {
  at::CPUGeneratorImpl& source = default_cpu_generator();
  std::lock_guard<std::mutex> source_lock(source.mutex_);
  std::lock_guard<std::mutex> lock(mutex_);
  look_at_default();
  if (plan_.unseen_start != nullptr) plan_.end = position_of(source);
  start_.reset();
  is_settled_ = true;
}

at::Generator& DrawReplay::next() {
  if (!generator_.defined()) {
    generator_ = at::make_generator<at::CPUGeneratorImpl>();
    if (plan_.jumps.empty()) {  // forward drew nothing: whatever comes is as good
      at::CPUGeneratorImpl& source = default_cpu_generator();
      std::lock_guard<std::mutex> lock(source.mutex_);
      copy_state(source, impl_of(generator_));
    }
  }
  if (next_jump_ < plan_.jumps.size() && plan_.jumps[next_jump_].draw == num_draws_)
    set_state(impl_of(generator_), *plan_.jumps[next_jump_++].state);
  ++num_draws_;
  return generator_;
}

namespace {
std::mutex swapping;
thread_local int turns_of_this_thread = 0;
}  // namespace

DefaultGeneratorSwap::DefaultGeneratorSwap(const DrawPlan& plan) : plan_(plan) {
  if (!plan.uses_default()) return;
  constexpr int max_tries = 100;
  has_turn_ = turns_of_this_thread > 0;
  for (int i = 0; !has_turn_ && i < max_tries; ++i) {
    has_turn_ = swapping.try_lock();
    if (!has_turn_) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (has_turn_) ++turns_of_this_thread;
  at::CPUGeneratorImpl& source = default_cpu_generator();
  std::lock_guard<std::mutex> lock(source.mutex_);
  before_ = share_state(source);
  set_state(source, *plan_.unseen_start);
}

DefaultGeneratorSwap::~DefaultGeneratorSwap() {
  if (before_ != nullptr) {
    at::CPUGeneratorImpl& source = default_cpu_generator();
    std::lock_guard<std::mutex> lock(source.mutex_);
    set_state(source, *before_);
  }
  if (has_turn_ && --turns_of_this_thread == 0) swapping.unlock();
}

bool DefaultGeneratorSwap::was_disturbed() const {
  if (before_ == nullptr || !plan_.end) return false;
  at::CPUGeneratorImpl& source = default_cpu_generator();
  std::lock_guard<std::mutex> lock(source.mutex_);
  // One that does not move it draws nothing so: it was another thread that moved it in forward.
  return position_of(source) != *plan_.end && !is_at(source, *plan_.unseen_start);
}

}  // namespace remat
