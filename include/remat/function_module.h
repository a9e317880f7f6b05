#pragma once
// Finds the module behind a region's function without torch/nn; the region keeps it alive.

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "remat/export.h"

namespace torch::nn {
class AnyModule;
class Module;
}  // namespace torch::nn

namespace remat::detail {

/// Returns a pointer that shares the ownership of a module; empty if no shared pointer owns it, or
/// if it is null.
REMAT_API std::shared_ptr<const void> owner_of(const torch::nn::Module* module);

/// Throws the error for a call whose module is a null pointer.
[[noreturn]] REMAT_API void refuse_null_module();

// A class that derives from Module is complete where it is called, and then so is Module. The
// conversion of pointers therefore needs no header of Module.
template <class M>
concept IsModule = std::is_class_v<M> && std::is_convertible_v<M*, const torch::nn::Module*>;

template <class F>
concept IsModulePointer = std::is_pointer_v<F> && IsModule<std::remove_pointer_t<F>>;

/// Holds for shared and unique pointers to modules, and for holders.
template <class F>
concept OwnsModule =
    requires(const F& fn) { requires IsModule<std::remove_pointer_t<decltype(fn.get())>>; };

template <class F>
concept IsAnyModule = std::is_same_v<F, torch::nn::AnyModule>;

/// Holds for a wrapper around a function that several regions share.
template <class F>
concept IsShared = requires(const F& fn) { fn.shared_function(); };

template <class F>
torch::nn::Module* module_of(const F& fn) {
  const torch::nn::Module* module = nullptr;
  if constexpr (IsModulePointer<F>) {
    module = fn;
  } else if constexpr (OwnsModule<F>) {
    if constexpr (requires { fn.is_empty(); }) {  // a holder's get() throws
      if (!fn.is_empty()) module = fn.get();
    } else {
      module = fn.get();
    }
  } else if constexpr (IsAnyModule<F>) {
    if (!fn.is_empty()) module = fn.ptr().get();
  } else if constexpr (IsShared<F>) {
    module = module_of(fn.shared_function());
  }
  if constexpr (IsModulePointer<F> || OwnsModule<F>)
    if (module == nullptr) refuse_null_module();
  return const_cast<torch::nn::Module*>(module);
}

/// Returns the module that a call runs: its function, or the object of a pointer to a member.
template <class F, class... Args>
torch::nn::Module* module_of_call(const F& fn, const Args&... args) {
  if constexpr (std::is_member_pointer_v<F> && sizeof...(Args) > 0)
    return module_of(std::get<0>(std::tie(args...)));
  else
    return module_of(fn);
}

/// The type in which a function is kept. A raw pointer to a module becomes a shared one, so that
/// the graph keeps the module alive. The caller must keep a module alive that no shared pointer
/// owns (on the stack).
template <class F>
struct KeptAs {
  using type = F;
};
template <class F>
  requires IsModulePointer<F>
struct KeptAs<F> {
  using type = std::shared_ptr<std::remove_pointer_t<F>>;
};
template <class F>
using Kept = typename KeptAs<std::decay_t<F>>::type;

template <class F>
Kept<F> keep(F&& fn) {
  if constexpr (IsModulePointer<std::decay_t<F>>)
    return Kept<F>(owner_of(fn), fn);
  else
    return Kept<F>(std::forward<F>(fn));
}

}  // namespace remat::detail
