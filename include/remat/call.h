#pragma once
// Calls a user's function of any kind, and keeps what it is given or returns without its tensors.

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

#include "remat/tensors.h"

namespace remat {

/// Called with the place of a tensor, which it may empty or fill.
using TensorVisitor = c10::function_ref<void(at::Tensor&)>;

namespace detail {

template <class F, class... A>
concept HasForward = requires(F fn, A&&... args) { fn->forward(std::forward<A>(args)...); };

/// Not std::invocable alone: LibTorch's module holders claim to return void from the call operator
/// when `forward` is a template (torch::nn::Sequential), and then do not compile.
template <class F, class... A>
concept CallsForward = HasForward<F, A...> && (!std::invocable<F, A...> || (requires {
                         typename std::decay_t<F>::ContainedType;
                       } && std::is_void_v<std::invoke_result_t<F, A...>>));

/// `fn(args...)` in the sense of std::invoke, or `fn->forward(args...)`.
template <class F, class... A>
decltype(auto) call(F& fn, A&&... args) {
  if constexpr (CallsForward<F&, A...>)
    return fn->forward(std::forward<A>(args)...);
  else
    return std::invoke(fn, std::forward<A>(args)...);
}

/// The type an argument is kept and passed on as. What only refers to its elements (`x.sizes()`, a
/// tensor list, a string view) would dangle at the recompute; a copy that owns them stands for it.
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
concept Runnable =
    std::invocable<std::decay_t<F>&, Owned<A>...> || HasForward<std::decay_t<F>&, Owned<A>...>;

/// A value whose tensors were taken out and are kept elsewhere. Threads: `filled` may be called by
/// several at a time.
///
/// Note [Filling a copy]
/// A copy of a hash map, or of a user's type, may be walked in another order than the original,
/// so the tensors are put into the kept value itself and copied along, one copy at a time. Where
/// the order is certain the copy is filled directly, without a lock.
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

  /// A copy with `tensors`, which it takes, in their places.
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
