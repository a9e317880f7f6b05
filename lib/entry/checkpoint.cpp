// Definitions of checkpoint.h: the first run of a region.

#include "remat/checkpoint.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <typeinfo>
#include <utility>

#include "lib/base/error.h"
#include "lib/base/once_per_name.h"
#include "lib/base/stack_room.h"
#include "lib/entry/default_options.h"
#include "lib/entry/module_function.h"
#include "lib/entry/opaque_arguments.h"
#include "lib/entry/stack_captures.h"
#include "lib/frame/forward_scope.h"
#include "lib/frame/layers.h"
#include "lib/scope/profiler.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/warn.h"
#include "remat/script_call.h"

namespace remat {

using detail::Ability;
using detail::StackView;

namespace {

RegionOptions options_in_force(const CheckpointOptions& options, const FunctionFacts& facts,
                               const StackView& around) {
  RegionOptions in_force{.line = options.location.line,
                         .early_stop = options.early_stop,
                         .debug = options.debug,
                         .preserve_rng_state = options.preserve_rng_state,
                         .strict_unpack = options.strict_unpack,
                         .offload_inputs = options.offload_inputs,
                         .ignores_buffers = options.buffers == BufferPolicy::Ignore,
                         .copies_inputs = options.inputs == InputMode::CopyOnWrite,
                         .always_stops = facts.always_stops,
                         .determinism_check = options.determinism_check,
                         .capture_check = options.capture_check};
  if (const detail::Scope* guard = around.innermost(Ability::EarlyStop)) {
    in_force.early_stop_guard = guard->early_stop;
    in_force.early_stop = guard->early_stop.value_or(options.early_stop);
  }
  if (const detail::Scope* guard = around.innermost(Ability::Debug)) {
    in_force.debug_guard = guard->debug;
    in_force.debug = guard->debug.value_or(options.debug);
  }
  return in_force;
}

std::unique_ptr<RegionExtras> extras_of(const CheckpointOptions& options,
                                        const RegionOptions& in_force, const StackView& around) {
  std::unique_ptr<TensorCheck> check = check_for(options);
  const detail::Scope* const level_guard = around.innermost(Ability::Level);
  const bool has_depth =
      options.offload_prefetch_depth != CheckpointOptions().offload_prefetch_depth;
  if (options.name.empty() && check == nullptr && !options.context_fn && !in_force.debug &&
      level_guard == nullptr && !has_depth && options.handle == nullptr &&
      options.prepare_ahead == 0)
    return nullptr;
  auto extras = std::make_unique<RegionExtras>();
  extras->name = options.name;
  extras->check = std::move(check);
  if (level_guard != nullptr) extras->training_level = level_guard->training_level();
  if (has_depth) extras->offload_prefetch_depth = options.offload_prefetch_depth;
  if (options.handle != nullptr || options.prepare_ahead > 0) {
    extras->ahead = std::make_unique<AheadLink>();
    extras->ahead->num_regions = options.prepare_ahead;
    extras->ahead->handle = options.handle;
  }
  return extras;
}

void refuse_absent(bool is_there, const char* option, const char* layer) {
  if (!is_there)
    throw_unsupported(std::string("CheckpointOptions::") + option + " was set",
                      std::string("this build of remat has no ") + layer,
                      "build remat without -Donly_core=true, or leave the option out");
}

void refuse(const CheckpointOptions& options, const RegionOptions& in_force) {
  refuse_absent(!options.policy || layers.keep_by_policy != nullptr, "policy", "policies");
  refuse_absent(!options.offload_inputs || layers.offload_input != nullptr, "offload_inputs",
                "offloading");
  TORCH_CHECK_VALUE(!(in_force.debug && options.context_fn),
                    "remat::checkpoint: debug=True is incompatible with non-default context_fn. "
                    "Hint: drop one of the two for this region.");
  TORCH_CHECK_VALUE(options.offload_prefetch_depth >= 0,
                    "remat::checkpoint: offload_prefetch_depth is ", options.offload_prefetch_depth,
                    ".\nHint: give 0 or more.");
  TORCH_CHECK_VALUE(options.prepare_ahead >= 0, "remat::checkpoint: prepare_ahead is ",
                    options.prepare_ahead, ".\nHint: give 0 or more.");
  if (!has_stack_room())
    throw_unsupported("regions are nested too deep for this thread's stack",
                      "each region runs on the stack of the region around it",
                      "nest less deep, or use a thread with a larger stack");
}

/// A reason for which a region cannot be opened.
struct Obstacle {
  const char* fact;
  const char* cause;
};
constexpr Obstacle in_transform{
    "a region was opened inside a functorch transform",
    "a recompute runs outside the transform, and torch.func.grad refuses "
    "saved-tensor hooks"};
constexpr Obstacle has_tangent{"an argument carries a forward-mode tangent",
                               "forward-mode AD cannot follow a recompute"};

/// Warns once that regions run plainly; throws if the options refuse that.
void accept(const Obstacle& obstacle, const CheckpointOptions& options) {
  if (options.transforms == Transforms::Refuse)
    throw_unsupported(obstacle.fact, obstacle.cause,
                      "call the function without remat::checkpoint there, or leave "
                      "CheckpointOptions::transforms at RunPlainly");
  static OncePerName warned;
  if (!warned.is_first(obstacle.fact)) return;
  seam::warn(c10::str("remat::checkpoint: ", obstacle.fact,
                      ", and runs plainly: autograd keeps every tensor that "
                      "it saves there, as without remat::checkpoint. Cause: ",
                      obstacle.cause,
                      ". Hint: open the region outside, or set CheckpointOptions::transforms = "
                      "remat::Transforms::Refuse to get an error. This warning is given once."));
}

}  // namespace

namespace detail {

void refuse_shared_argument() {
  remat::throw_unsupported(
      "an argument's copies share their tensors with it",
      "its type has visit_tensors, but a copy of it is a handle to the same tensors; the region "
      "takes the tensors out of its own copy, which would take them out of the caller's "
      "argument, too",
      "let the copy constructor copy the tensor handles, or pass the tensors themselves");
}

}  // namespace detail

bool opens_region() { return c10::GradMode::is_enabled() && !is_checkpointing_disabled(); }

bool opens_region(const CheckpointOptions& options) {
  if (!opens_region()) return false;
  if (!options.level) return true;
  TORCH_CHECK_VALUE(*options.level >= 0, "remat::checkpoint: CheckpointOptions::level was ",
                    *options.level,
                    ".\nHint: 0 for never, 1 and up for the level that turns the region on.");
  const detail::Scope* const guard = detail::innermost(Ability::Level);
  return *options.level > 0 && (guard == nullptr || guard->training_level() >= *options.level);
}

ForwardRun::ForwardRun(const CheckpointOptions& given, std::unique_ptr<RegionBody> body,
                       const FunctionFacts& facts)
    : visit_opaque_(facts.visit_opaque) {
  const std::optional<CheckpointOptions> merged = with_default_options(given);
  const CheckpointOptions& options = merged ? *merged : given;
  const StackView stack;
  const RegionOptions in_force = options_in_force(options, facts, stack);
  refuse(options, in_force);
  // The key is included while the stack of transforms is not empty; functorch's own state outlives
  // that stack.
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    accept(in_transform, options);
    plain_ = std::move(body);
    user_scope_ = register_plain_call(options, facts.module,
                                      facts.script == nullptr ? nullptr : &facts.script->module());
    return;
  }
  auto own = register_modules(options, facts.module,
                              facts.script == nullptr ? nullptr : &facts.script->module());
  const auto* const around =
      static_cast<const detail::RegionScope*>(stack.innermost(Ability::Region));
  const std::type_info* type = facts.type;
  if (type == nullptr && facts.module != nullptr) type = &typeid(*facts.module);
  frame_ = c10::make_intrusive<Frame>(in_force, extras_of(options, in_force, stack),
                                      around == nullptr ? nullptr : &around->region(), type,
                                      options.location.file);
  RegionExtras* const extras = frame_->region().extras.get();
  if (options.context_fn) extras->contexts = options.context_fn();
  try {
    if (!frame_->begin(std::move(body), facts.sees_end, own)) {
      frame_.reset();
      return;
    }
  } catch (const CarriesTangent&) {
    accept(has_tangent, options);
    plain_ = frame_->take_body();
    frame_.reset();
    user_scope_ = watch_modules(std::move(own));
    return;
  }
  profiled_ = profiler::forward_scope(frame_->region().info);
  auto scope = std::make_shared<ForwardScope>(frame_, around, std::move(own));
  detail::push(scope);
  if (in_force.capture_check == CaptureCheck::Raise) seam::NodeWatches::begin(scope);
  scope_ = std::move(scope);
  if (options.policy) {
    layers.keep_by_policy(*frame_, options.policy);
    dispatch_mode_ = std::make_shared<seam::DispatchMode>();
  }
  frame_->notes().note_operators(seam::is_dispatch_mode_on());
  if (in_force.debug) warn_of_stack_captures(facts, frame_->region().info.name());
  if (in_force.debug) logging_ = std::make_unique<OpLogScope>(&extras->forward_log);
  if (extras == nullptr || !extras->contexts.forward) return;
  try {
    user_scope_ = extras->contexts.forward();
  } catch (...) {
    close();
    throw;
  }
}

ForwardRun::~ForwardRun() {
  if (scope_ == nullptr) return;
  close();
  if (RecordedFrame* const recorded = frame_->recorded()) recorded->throws();
}

void ForwardRun::close() {
  user_scope_.reset();
  logging_.reset();
  dispatch_mode_.reset();
  detail::pop(*scope_);
  seam::NodeWatches::end();
  scope_.reset();
  profiled_.reset();
}

void ForwardRun::finish(c10::function_ref<void(TensorVisitor)> visit_result) {
  if (plain_ != nullptr) return user_scope_.reset();
  TORCH_CHECK_VALUE(
      scope_ != nullptr,
      "remat::ForwardRun: finish was called on a run that had ended.\n"
      "Cause: it was called before, or a recompute around the run ended it (see has_ended).\n"
      "Hint: call it once, after the function has returned.");
  auto& scope = static_cast<ForwardScope&>(*scope_);
  scope.wait_for_engine(visit_result);
  scope.scripts()->end();
  if (!scope.scripts()->plans().empty()) frame_->notes().note_scripts(scope.scripts()->plans());
  close();
  frame_->settle(visit_result);
  if (const RegionExtras* const extras = frame_->region().extras.get())
    if (extras->ahead != nullptr) link(frame_, visit_result);
  if (visit_opaque_ != nullptr && frame_->region().info.depth > 1)
    warn_of_opaque_arguments(*frame_, visit_opaque_);
}

}  // namespace remat
