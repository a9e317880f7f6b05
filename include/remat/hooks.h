#pragma once
// Saved-tensor hooks for any C++ program: what autograd saves goes through two functions.

#include <ATen/core/Tensor.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "remat/export.h"
#include "remat/scope.h"

namespace remat {

namespace detail {

/// A packed tensor: what a pack function returned, and how to unpack it.
class PackedTensor {
 public:
  virtual ~PackedTensor() = default;
  virtual at::Tensor unpack() = 0;
};

/// A pair of user functions; shared by the guard and by every tensor it packed.
class HookPair {
 public:
  virtual ~HookPair() = default;
  virtual std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) = 0;
};

/// What is stored of a tensor that a pack function returned. See Note [Identity packs].
REMAT_API at::Tensor without_history(const at::Tensor& packed);

template <class Pack, class Unpack>
class HookPairOf final : public HookPair {
 public:
  HookPairOf(Pack pack, Unpack unpack)
      : pack_(std::move(pack)), unpack_(std::make_shared<Unpack>(std::move(unpack))) {}

  std::unique_ptr<PackedTensor> pack(const at::Tensor& tensor) override {
    using Packed = std::decay_t<std::invoke_result_t<Pack&, at::Tensor>>;
    if constexpr (std::same_as<Packed, at::Tensor>) {
      return std::make_unique<Slot<Packed>>(without_history(pack_(tensor)), unpack_);
    } else {
      return std::make_unique<Slot<Packed>>(pack_(tensor), unpack_);
    }
  }

 private:
  template <class Packed>
  class Slot final : public PackedTensor {
   public:
    Slot(Packed packed, std::shared_ptr<Unpack> unpack)
        : packed_(std::move(packed)), unpack_(std::move(unpack)) {}
    at::Tensor unpack() override { return (*unpack_)(std::as_const(packed_)); }

   private:
    Packed packed_;
    std::shared_ptr<Unpack> unpack_;
  };

  Pack pack_;
  std::shared_ptr<Unpack> unpack_;
};

}  // namespace detail

/// While alive, every tensor that autograd saves on this thread goes through `pack`, and comes
/// back through `unpack` when backward asks for it (Rule 16: user hooks outside a region see the
/// region's inputs; inside a region they hide its own hook).
///
/// `pack: at::Tensor -> P` for any copyable or movable P; called under no-grad; it must not change
/// its argument. `unpack: const P& -> at::Tensor`; may be called more than once, on any thread
/// that runs backward. Both functions live until the guard and every tensor packed under it are
/// gone. Returning the argument or a view of it from `pack` makes no reference cycle; a P that
/// wraps it in another type should hold `x.detach()`.
///
/// Throws `c10::Error` with the message of an active `DisableSavedTensorHooksGuard` (or of
/// Python's `disable_saved_tensors_hooks`). Exceptions of the functions keep their type.
/// Source: `torch.autograd.graph.saved_tensors_hooks`.
class REMAT_API SavedTensorHooksGuard : detail::ScopeGuard {
 public:
  template <class Pack, class Unpack>
  SavedTensorHooksGuard(Pack pack, Unpack unpack)
      : SavedTensorHooksGuard(
            std::shared_ptr<detail::HookPair>(std::make_shared<detail::HookPairOf<Pack, Unpack>>(
                std::move(pack), std::move(unpack)))) {
    static_assert(std::is_invocable_v<Pack&, at::Tensor>, "pack must accept an at::Tensor");
    using Packed = std::decay_t<std::invoke_result_t<Pack&, at::Tensor>>;
    static_assert(std::is_invocable_r_v<at::Tensor, Unpack&, const Packed&>,
                  "unpack must accept what pack returns, by const reference, and return a tensor");
  }

 private:
  explicit SavedTensorHooksGuard(std::shared_ptr<detail::HookPair> pair);
};

/// While alive, opening saved-tensor hooks or a region on this thread throws `c10::Error` with
/// `message`; nested guards: the innermost message. Its constructor throws the same when hooks are
/// active already, and leaves them active. Shares LibTorch's switch with Python.
class REMAT_API DisableSavedTensorHooksGuard : detail::ScopeGuard {
 public:
  explicit DisableSavedTensorHooksGuard(std::string message);
};

}  // namespace remat
