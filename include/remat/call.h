#pragma once
// Calls a user's function of any kind, and stores its arguments or result without their tensors.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <concepts>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/function_module.h"
#include "remat/tensors.h"

namespace c10 {
struct IValue;
}
namespace torch::jit {
struct Method;
struct Module;
}  // namespace torch::jit

namespace remat {

/// A function that receives a reference to a tensor, and may empty or fill it.
using TensorVisitor = c10::function_ref<void(at::Tensor&)>;

namespace detail {

template <class F, class... A>
concept HasForward = requires(F fn, A&&... args) { fn->forward(std::forward<A>(args)...); };

/// Holds for a `Checkpointed`: as the function of a region it runs in that region, and opens no
/// region of its own.
template <class F, class... A>
concept RunsInCallersRegion =
    requires(F& fn, A&&... args) { fn->run_in_callers_region(std::forward<A>(args)...); };

// The call operator of LibTorch's holders seems to return void where `forward` is a template
// (Sequential). The question whether it takes arguments that `forward` does not take is a hard
// error. Therefore a holder is called through `forward`, unless its class has a call operator of
// its own.
template <class F, class... A>
concept Invokes =
    (!requires { typename F::ContainedType; } || requires { &F::operator(); }) &&  // no such holder
    std::invocable<F&, A...>;

template <class F, class... A>
concept CallsForward = HasForward<F&, A...> && !Invokes<F, A...>;

template <class F, class... A>
concept CallsAnyModule =
    IsAnyModule<F> && requires(F& fn, A&&... args) { fn.forward(std::forward<A>(args)...); };

template <class F>
concept IsScript = std::is_same_v<F, torch::jit::Module> || std::is_same_v<F, torch::jit::Method>;

template <class F, class... A>
concept CallsScript =
    IsScript<F> && !Invokes<F, A...> && (std::convertible_to<A, c10::IValue> && ...);

/// Makes IValue depend on a template parameter, so that it may be incomplete in programs without
/// script modules.
template <class F>
struct ScriptValue {
  using type = c10::IValue;
};

template <class F, class... A>
std::vector<typename ScriptValue<F>::type> script_values(A&&... args) {
  std::vector<typename ScriptValue<F>::type> values;
  (values.emplace_back(std::forward<A>(args)), ...);
  return values;
}

/// Calls `fn(args...)` in the sense of std::invoke, or `forward` if `fn` is a module.
template <class F, class... A>
decltype(auto) call(F& fn, A&&... args) {
  if constexpr (RunsInCallersRegion<F, A...>) {
    return fn->run_in_callers_region(std::forward<A>(args)...);
  } else if constexpr (CallsForward<F, A...>) {
    return fn->forward(std::forward<A>(args)...);
  } else if constexpr (CallsAnyModule<F, A...>) {
    return fn.forward(std::forward<A>(args)...);
  } else if constexpr (CallsScript<F, A...>) {
    auto values = script_values<F>(std::forward<A>(args)...);
    if constexpr (std::is_same_v<F, torch::jit::Module>)
      return fn.forward(std::move(values));
    else
      return fn(std::move(values));
  } else {
    return std::invoke(fn, std::forward<A>(args)...);
  }
}

/// Visits the tensors in the result of a call. A script module returns them inside an IValue.
template <class Result>
void visit_result(Result& result, TensorVisitor visitor) {
  if constexpr (std::is_same_v<Result, c10::IValue>)
    result.visit([&](const Result& value) {
      if (value.isTensor()) {
        at::Tensor tensor = value.toTensor();
        visitor(tensor);
      }
      return false;
    });
  else
    Tensors<Result>::visit(result, visitor);
}

/// The type in which an argument is kept and passed on. A type that only refers to its elements
/// (`x.sizes()`, a tensor list, a string view) would dangle at the recompute; an owning copy
/// replaces it.
template <class T>
struct OwnedAs {
  using type = T;
};
template <class T>
struct OwnedAs<c10::ArrayRef<T>> {
  using type = std::vector<T>;
};
template <>
struct OwnedAs<std::string_view> {
  using type = std::string;
};
template <class T>
using Owned = typename OwnedAs<std::decay_t<T>>::type;

template <class T>
Owned<T> own(T&& value) {
  if constexpr (std::constructible_from<Owned<T>, T&&>)
    return Owned<T>(std::forward<T>(value));
  else
    return value.vec();
}

template <class T>
inline constexpr bool is_optional_array_ref = false;
template <class T>
inline constexpr bool is_optional_array_ref<c10::OptionalArrayRef<T>> = true;

template <class F, class... A>
concept RunnableAs = Invokes<F, A...> || HasForward<F&, A...> || RunsInCallersRegion<F, A...> ||
                     CallsAnyModule<F, A...> || CallsScript<F, A...>;
template <class F, class... A>
concept Runnable = RunnableAs<std::decay_t<F>, Owned<A>...>;

/// A value whose tensors were taken out and are kept elsewhere. Threads: several may call `filled`
/// at once.
///
/// Note [Filling a copy]
/// A copy of a hash map, or of a user's type, may have another order of iteration than the
/// original. The tensors are therefore put into the kept value, which is copied with them, one copy
/// at a time. If the order is certain, the copy is filled directly, without a lock.
template <class T>
class Emptied {
 public:
  using Walk = Tensors<T>;

  template <class... From>
  explicit Emptied(From&&... from) : value(std::forward<From>(from)...) {
    Walk::own(value);
  }

  /// Visits the places of the tensors, always in the same order.
  void visit(TensorVisitor visitor) { Walk::visit(value, visitor); }

  /// Returns a copy with `tensors` in their places. Moves from `tensors`.
  T filled(std::vector<at::Tensor>& tensors) {
    std::size_t next = 0;
    auto fill = [&](at::Tensor& tensor) { tensor = std::move(tensors[next++]); };
    if constexpr (!Walk::any) {
      return value;
    } else if constexpr (Walk::ordered) {
      T fresh = value;
      Walk::own(fresh);
      Walk::visit(fresh, fill);
      return fresh;
    } else {
      struct Clear {
        T& kept;
        ~Clear() {
          auto clear = [](at::Tensor& tensor) { tensor = at::Tensor(); };
          Walk::visit(kept, clear);
        }
      };
      std::lock_guard<std::mutex> lock(filling_);
      Clear clear{value};
      Walk::visit(value, fill);
      T fresh = value;
      Walk::own(fresh);
      return fresh;
    }
  }

  T value;

 private:
  struct NoMutex {};
  [[no_unique_address]] std::conditional_t<Walk::any && !Walk::ordered, std::mutex, NoMutex>
      filling_;
};

}  // namespace detail
}  // namespace remat
