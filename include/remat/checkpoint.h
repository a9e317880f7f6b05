#pragma once
// checkpoint(): runs a function now, drops the tensors that autograd saves in it, and recomputes
// them in backward.

#if defined(__cplusplus) && __cplusplus < 202002L
#error "remat needs C++20: compile with -std=c++20, or set CMAKE_CXX_STANDARD to 20"
#endif

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/binding.h"
#include "remat/call.h"
#include "remat/export.h"
#include "remat/options.h"
#include "remat/refused.h"
#include "remat/script_call.h"

namespace remat {

namespace detail {

/// Throws the error for an argument whose copies share their tensors: a region cannot keep it.
[[noreturn]] REMAT_API void refuse_shared_argument();

template <class T>
int64_t count_defined(T& value) {
  int64_t defined = 0;
  auto count = [&defined](at::Tensor& tensor) { defined += tensor.defined() ? 1 : 0; };
  Tensors<T>::visit(value, count);
  return defined;
}

/// Returns whether taking the tensors out of `kept`, a copy of `original`, takes them out of both:
/// true for a user type with the semantics of a handle.
template <class T>
bool shares_tensors(T& kept, T& original) {
  const int64_t before = count_defined(original);
  std::vector<at::Tensor> taken;
  auto take = [&taken](at::Tensor& tensor) {
    taken.push_back(std::exchange(tensor, at::Tensor()));
  };
  Tensors<T>::visit(kept, take);
  const bool is_shared = count_defined(original) != before;
  std::size_t next = 0;
  auto put_back = [&](at::Tensor& tensor) { tensor = std::move(taken[next++]); };
  Tensors<T>::visit(kept, put_back);
  return is_shared;
}

/// A call that may run plainly; it registers its modules' state with the enclosing regions.
struct PlainCall {
  bool is_plain = false;
  std::shared_ptr<void> registered{};
};
/// Returns whether a call runs plainly because of grad mode, a guard, its level (also with a module
/// in eval mode), or a BatchNorm in its modules (`SkipBatchNorm`).
REMAT_API PlainCall runs_plainly(const CheckpointOptions& options, torch::nn::Module* module,
                                 const torch::jit::Module* script = nullptr);

/// Replaces ScriptCall for functions that are no script functions.
struct NoScript {
  explicit NoScript(const auto&) {}
};

template <class F>
const auto& unshared(const F& function) {
  if constexpr (IsShared<F>)
    return unshared(function.shared_function());
  else
    return function;
}
template <class F>
using Unshared = std::decay_t<decltype(unshared(std::declval<const F&>()))>;

/// True for an argument that is copied into a region as it is, although it may hold tensors.
template <class T>
inline constexpr bool is_opaque =
    std::is_class_v<T> && !Tensors<T>::any && !std::is_trivially_copyable_v<T>;

template <class F, class... A>
class Body final : public RegionBody {
 public:
  using Arguments = std::tuple<A...>;

  template <class Fn, class... Args>
  explicit Body(Fn&& fn, const Args&... args)
      : function(std::forward<Fn>(fn)), script(unshared(function)), kept_(own(args)...) {
    if constexpr (Tensors<Arguments>::any && !Tensors<Arguments>::ordered) check_ownership(args...);
  }

  void visit_inputs(TensorVisitor visitor) override { kept_.visit(visitor); }

  void run_again(std::vector<at::Tensor>& inputs) override {
    Arguments fresh = kept_.filled(inputs);
    std::apply([this](A&... args) { static_cast<void>(run(std::move(args)...)); }, fresh);
  }

  /// Runs the function once.
  template <class... Args>
  decltype(auto) run(Args&&... args) {
    if constexpr (is_script)
      return script.run(script_values<Unshared<F>>(std::forward<Args>(args)...));
    else
      return call(function, std::forward<Args>(args)...);
  }

  FunctionFacts facts(torch::nn::Module* module) const {
    FunctionFacts all = facts_of(unshared(function), module);
    if constexpr (is_script) all.script = &script;
    if constexpr ((is_opaque<A> || ...)) all.visit_opaque = visit_opaque;
    return all;
  }

  bool can_be_stopped() const override { return !std::is_nothrow_invocable_v<F&, A...>; }

  static constexpr bool is_script = IsScript<Unshared<F>>;
  F function;
  [[no_unique_address]] std::conditional_t<is_script, ScriptCall, NoScript> script;

 private:
  template <class Fn>
  static FunctionFacts facts_of(const Fn& fn, torch::nn::Module* module) {
    FunctionFacts facts{
        .module = module, .object = &fn, .num_bytes = std::is_empty_v<Fn> ? 0 : sizeof(fn)};
    if constexpr (requires { Fn::type_of_name(); }) facts.type = &Fn::type_of_name();
    return facts;
  }

  static void visit_opaque(const RegionBody& body, OpaqueVisitor visitor) {
    int64_t number = 0;
    const auto visit = [&]<class T>(const T& argument) {
      if constexpr (is_opaque<T>) visitor(number, &argument, sizeof(T), typeid(T));
      ++number;
    };
    std::apply([&](const A&... kept) { (visit(kept), ...); },
               static_cast<const Body&>(body).kept_.value);
  }

  template <class... Args>
  void check_ownership(const Args&... args) {
    const auto check = [](auto& kept, const auto& original) {
      using T = std::decay_t<decltype(kept)>;
      if constexpr (Tensors<T>::any && !Tensors<T>::ordered &&
                    std::same_as<T, std::decay_t<decltype(original)>>)
        if (shares_tensors(kept, const_cast<T&>(original))) refuse_shared_argument();
    };
    std::apply([&](A&... kept) { (check(kept, args), ...); }, kept_.value);
  }

  Emptied<Arguments> kept_;
};

template <class Fn, class... Args>
auto run_region(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  using F = Kept<Fn>;
  static_assert((std::copy_constructible<Owned<Args>> && ...),
                "remat::checkpoint: every argument must be copyable, since each recompute gets a "
                "fresh copy; capture a move-only value in the function instead");
  static_assert((!is_optional_array_ref<std::decay_t<Args>> && ...),
                "remat::checkpoint: a c10::OptionalArrayRef does not own its elements and would "
                "dangle at the recompute; pass a std::optional of a std::vector");
  using Result = std::decay_t<decltype(call(std::declval<F&>(), std::declval<Owned<Args>>()...))>;
  torch::nn::Module* const module = module_of_call(fn, args...);
  PlainCall plainly{.is_plain = !opens_region()};
  const bool has_modules = IsScript<Unshared<F>> || module != nullptr || !options.modules.empty();
  if (options.buffers == BufferPolicy::SkipBatchNorm || options.level ||
      (plainly.is_plain && has_modules)) {
    if constexpr (IsScript<Unshared<F>>)
      plainly = runs_plainly(options, module, &ScriptCall(unshared(fn)).module());
    else
      plainly = runs_plainly(options, module);
  }
  if (plainly.is_plain) {
    F plain(keep(std::forward<Fn>(fn)));
    return static_cast<Result>(call(plain, own(std::forward<Args>(args))...));
  }
  using RegionOfCall = Body<F, Owned<Args>...>;
  auto body = std::make_unique<RegionOfCall>(keep(std::forward<Fn>(fn)), args...);
  RegionOfCall& region = *body;
  const FunctionFacts facts = region.facts(module);
  ForwardRun run(options, std::move(body), facts);
  if constexpr (std::is_void_v<Result>) {
    region.run(own(std::forward<Args>(args))...);
    run.finish([](TensorVisitor) {});
  } else {
    Result result = region.run(own(std::forward<Args>(args))...);
    run.finish([&](TensorVisitor visitor) { visit_result(result, visitor); });
    return result;
  }
}

/// Calls a member of a module through a raw pointer, which the region keeps as a shared pointer.
template <class Fn, class M, class... Args>
  requires std::is_member_pointer_v<std::decay_t<Fn>> && IsModulePointer<std::decay_t<M>>
auto run_call(const CheckpointOptions& options, Fn&& fn, M&& object, Args&&... args) {
  return run_region(options, std::forward<Fn>(fn), keep(object), std::forward<Args>(args)...);
}
template <class... FnAndArgs>
auto run_call(const CheckpointOptions& options, FnAndArgs&&... fn_and_args) {
  return run_region(options, std::forward<FnAndArgs>(fn_and_args)...);
}

/// A function that is shared by all regions of it.
template <class F>
struct SharedFunction {
  std::shared_ptr<F> function;

  const F& shared_function() const { return *function; }
  template <class... A>
  decltype(auto) operator()(A&&... args) const {
    return call(*function, std::forward<A>(args)...);
  }
};

template <class Fn>
class CheckpointedFunction {
 public:
  CheckpointedFunction(Fn fn, CheckpointOptions options)
      : function_{std::make_shared<Kept<Fn>>(keep(std::move(fn)))}, options_(std::move(options)) {}

  template <class... Args>
    requires Runnable<Fn&, Args...>
  auto operator()(Args&&... args) const {
    return run_region(options_, function_, std::forward<Args>(args)...);
  }
  template <class... Args, IsRefused Cause = CauseOf<Fn&, Args...>>
  Cause operator()(Args&&...) const = delete;

 private:
  SharedFunction<Kept<Fn>> function_;
  CheckpointOptions options_;
};

}  // namespace detail

/// Runs `fn(args...)` now and returns its result unchanged (any type; references decay). Keeps no
/// tensor that autograd saves inside. When backward first needs one, `fn` runs again with the same
/// arguments to recompute it (`torch/utils/checkpoint.py`, use_reentrant=False).
///
/// Memory: the region's tensor arguments (in containers and user structs too) stay until the graph
/// no longer refers to the region. Inside an enclosing region not even they stay (docs/concepts.md,
/// Nesting).
/// Arguments: `fn` and `args` are decay-copied as by std::thread, and every run gets fresh rvalue
/// copies. An array or string that only refers to its elements (`x.sizes()`) is kept as a
/// `std::vector` or `std::string`. Arguments must be copyable; `fn` need not be. `std::ref` passes
/// a true reference, whose object must stay alive and unchanged. For a struct that holds tensors,
/// provide
///
///     template <class Visitor>
///     void visit_tensors(T& value, Visitor&& visit);  // visit(at::Tensor&)
///
/// found by ADL.
///
/// `fn` is a lambda, a function pointer, a member pointer or a module. Modules: holders
/// (`checkpoint(block, x)`), shared and raw pointers, `torch::nn::AnyModule` (its result is a
/// tensor), `torch::jit::Module` (an IValue). `fn` must compute the same again; docs/concepts.md,
/// Recompute, lists the checks. A recompute sees a torch::nn module's training flags and buffers as
/// forward did, and restores them afterwards (`CheckpointOptions::buffers`). Other functions list
/// the modules that they call in `modules`. A module behind a raw pointer is kept alive if a shared
/// pointer owns it. A `Checkpointed` as `fn` opens no region of its own. With grad mode off `fn`
/// runs plainly: an enclosing region restores the modules' buffers as `buffers` says, and all other
/// options are ignored. Threads: any; a recompute runs on the backward's thread that needs the
/// tensor. Throws: the exceptions of `fn`; `CheckpointError`; `c10::ValueError` for options that
/// exclude each other. Backward throws the same; exceptions of `fn` keep their type.
/// Example: examples/quickstart.cpp.
template <class Fn, class... Args>
  requires detail::Runnable<Fn, Args...>
auto checkpoint(Fn&& fn, Args&&... args) {
  static const CheckpointOptions defaults{.location = {}};
  return detail::run_call(defaults, std::forward<Fn>(fn), std::forward<Args>(args)...);
}

/// Does the same with options: `checkpoint({.name = "block 3"}, fn, x)`.
template <class Fn, class... Args>
  requires detail::Runnable<Fn, Args...>
auto checkpoint(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  return detail::run_call(options, std::forward<Fn>(fn), std::forward<Args>(args)...);
}

// Uncallable arguments give a readable error; a requires-expression sees an invalid call.
template <class Fn, class... Args, detail::IsRefused Cause = detail::CauseOf<Fn, Args...>>
Cause checkpoint(Fn&& fn, Args&&... args) = delete;
template <class Fn, class... Args, detail::IsRefused Cause = detail::CauseOf<Fn, Args...>>
Cause checkpoint(const CheckpointOptions& options, Fn&& fn, Args&&... args) = delete;

/// Returns a callable whose calls are checkpoints of `fn`. All calls and their graphs share one
/// `fn`, which may be move-only.
template <class Fn>
auto checkpointed(Fn fn, CheckpointOptions options = {}) {
  return detail::CheckpointedFunction<Fn>(std::move(fn), std::move(options));
}

}  // namespace remat
