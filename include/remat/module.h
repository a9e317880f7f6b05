#pragma once
// Modules that run as regions: the module itself, with the same children, names and call.

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <optional>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "remat/checkpoint.h"
#include "remat/module_region.h"

namespace remat {

namespace detail {

template <class Impl, class... Args>
concept TakesForward =
    requires(Impl& impl, Args&&... args) { impl.Impl::forward(std::forward<Args>(args)...); };

/// Throws the error for an `Impl::clone` that did not make an `Impl`.
[[noreturn]] REMAT_API void refuse_sliced_clone(const std::type_info& wanted);

/// A module of type `Impl` whose calls are regions. `Derived` adds `forward`.
template <class Impl>
class CheckpointedModule : public Impl, public HasModuleRegion {
  static_assert(std::is_base_of_v<torch::nn::Module, Impl>,
                "remat::Checkpointed takes the Impl type of a module: Checkpointed<LinearImpl>");
  static_assert(!std::is_base_of_v<HasModuleRegion, Impl>,
                "remat::Checkpointed: the module is a Checkpointed already");

 public:
  explicit CheckpointedModule(const std::type_info& type, ModuleOptions options)
      : Impl(), remat_region_(*this, type, std::move(options)) {}
  template <class... Args>
  CheckpointedModule(const std::type_info& type, ModuleOptions options, Args&&... args)
      : Impl(std::forward<Args>(args)...), remat_region_(*this, type, std::move(options)) {}
  CheckpointedModule(const std::type_info& type, const Impl& impl, const ModuleRegion& region)
      : Impl(impl), remat_region_(*this, type, region) {}

  /// Turns the region on or off. Existing graphs do not change.
  void set_checkpointing(bool enabled) { remat_region_.enable(enabled); }
  /// Returns whether calls are regions if grad mode, training mode and guards allow it.
  bool checkpointing() const { return remat_region_.is_enabled(); }

  /// Calls `Impl::forward` as a region, with any arguments that it accepts (default ones too). `R`:
  /// the result type for a template `forward` (`Sequential`); void: its default.
  template <class R = void, class... Args>
  auto run_checkpointed(Args&&... args) {
    static_assert(
        requires(Impl& impl, Args&&... a) {
          impl.Impl::forward(Owned<Args>(std::forward<Args>(a))...);
        },
        "remat::Checkpointed: forward must accept copies of its arguments, as each recompute "
        "passes them; it cannot take one by non-const reference");
    using Result = std::decay_t<decltype(call_plain<R>(*this, std::forward<Args>(args)...))>;
    if (!remat_region_.is_wanted()) {
      std::optional<ModuleStateGuard> state;
      if (remat_region_.is_watched()) state.emplace(remat_region_);
      if constexpr (!std::is_void_v<Result>) {
        if (remat_region_.is_off_in_eval()) {
          Result result = call_plain<R>(*this, std::forward<Args>(args)...);
          visit_result(result, [&](at::Tensor& each) { remat_region_.watch_result(each); });
          return result;
        }
      }
      return static_cast<Result>(call_plain<R>(*this, std::forward<Args>(args)...));
    }
    const ModuleStateGuard state(remat_region_);
    constexpr bool is_noexcept =
        noexcept(std::declval<Impl&>().Impl::forward(std::declval<Owned<Args>>()...));
    auto forward = [self = std::shared_ptr<Impl>(remat_region_.owner(), this)](
                       auto&&... a) noexcept(is_noexcept) -> Result {
      return call_plain<R>(*self, std::forward<decltype(a)>(a)...);
    };
    return run_region(remat_region_.checkpoint_options(),
                      CalledByType<decltype(forward), Impl>{std::move(forward)},
                      std::forward<Args>(args)...);
  }

  /// Runs the module as the function of a region that the caller has opened with its own options.
  template <class... Args>
    requires TakesForward<Impl, Args...>
  decltype(auto) run_in_callers_region(Args&&... args) {
    remat_region_.note_call();
    return Impl::forward(std::forward<Args>(args)...);
  }

 protected:
  ModuleRegion remat_region_;

 private:
  template <class R, class... Args>
  static decltype(auto) call_plain(Impl& impl, Args&&... args) {
    if constexpr (std::is_void_v<R>)
      return impl.Impl::forward(std::forward<Args>(args)...);
    else
      return impl.Impl::template forward<R>(std::forward<Args>(args)...);
  }
  ModuleRegion& remat_region() override { return remat_region_; }
  const std::type_info& plain_type() const override { return typeid(Impl); }
};

template <class Impl>
constexpr auto forward_of() {
  if constexpr (requires { &Impl::forward; }) return &Impl::forward;
}

/// Adds `forward` with the signature of `Impl::forward`, as `torch::nn::AnyModule` requires. If
/// that is a template (`Sequential`) or has overloads, the added one is a template, too.
template <class Impl, class Function = decltype(forward_of<Impl>())>
class CheckpointedForward : public CheckpointedModule<Impl> {
 public:
  using CheckpointedModule<Impl>::CheckpointedModule;
  template <class R = void, class... Args>
    requires TakesForward<Impl, Owned<Args>...>
  auto forward(Args&&... args) {
    return this->template run_checkpointed<R>(std::forward<Args>(args)...);
  }
};

template <class Impl, class C, class R, class... A>
class CheckpointedForward<Impl, R (C::*)(A...)> : public CheckpointedModule<Impl> {
 public:
  using CheckpointedModule<Impl>::CheckpointedModule;
  R forward(A... args) { return this->run_checkpointed(std::forward<A>(args)...); }
};
template <class Impl, class C, class R, class... A>
class CheckpointedForward<Impl, R (C::*)(A...) noexcept>
    : public CheckpointedForward<Impl, R (C::*)(A...)> {
 public:
  using CheckpointedForward<Impl, R (C::*)(A...)>::CheckpointedForward;
};
// A const forward becomes a non-const one, since LibTorch's AnyModule accepts no const forward.
template <class Impl, class C, class R, class... A>
class CheckpointedForward<Impl, R (C::*)(A...) const>
    : public CheckpointedForward<Impl, R (C::*)(A...)> {
 public:
  using CheckpointedForward<Impl, R (C::*)(A...)>::CheckpointedForward;
};
template <class Impl, class C, class R, class... A>
class CheckpointedForward<Impl, R (C::*)(A...) const noexcept>
    : public CheckpointedForward<Impl, R (C::*)(A...)> {
 public:
  using CheckpointedForward<Impl, R (C::*)(A...)>::CheckpointedForward;
};

}  // namespace detail

/// An `Impl` whose forward is a region, with the same children, names of parameters and buffers,
/// archives and `forward` signature (a template if that is one or is overloaded).
template <class Impl>
class CheckpointedImpl : public detail::CheckpointedForward<Impl> {
  using Base = detail::CheckpointedForward<Impl>;

 public:
  CheckpointedImpl()
    requires std::default_initializable<Impl>
      : Base(typeid(CheckpointedImpl), ModuleOptions{}) {}
  /// Takes the options, then the arguments of `Impl`'s constructor.
  template <class... Args>
  explicit CheckpointedImpl(ModuleOptions options, Args&&... args)
      : Base(typeid(CheckpointedImpl), std::move(options), std::forward<Args>(args)...) {}
  /// Takes the arguments of `Impl`'s constructor, without options.
  template <class First, class... Rest>
    requires(!std::derived_from<std::remove_cvref_t<First>, CheckpointedImpl> &&
             !std::same_as<std::remove_cvref_t<First>, ModuleOptions>)
  explicit CheckpointedImpl(First&& first, Rest&&... rest)
      : Base(typeid(CheckpointedImpl), ModuleOptions{}, std::forward<First>(first),
             std::forward<Rest>(rest)...) {}
  /// Copies as `Impl` copies, with the same options and switch.
  CheckpointedImpl(const CheckpointedImpl& other)
      : Base(typeid(CheckpointedImpl), static_cast<const Impl&>(other), other.remat_region_) {}
  /// Assigns `Impl`, the options and the switch.
  CheckpointedImpl& operator=(const CheckpointedImpl&) = default;

  /// Returns a checkpointed module with the same options and switch; `Impl::clone` copies the rest.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    std::shared_ptr<torch::nn::Module> plain = Impl::clone(device);
    if constexpr (std::copy_constructible<Impl>) {
      const auto* impl = dynamic_cast<const Impl*>(plain.get());
      if (impl == nullptr) detail::refuse_sliced_clone(typeid(Impl));
      auto copy =
          std::shared_ptr<CheckpointedImpl>(new CheckpointedImpl(*impl, this->remat_region_));
      copy->remat_region_.was_cloned();
      return copy;
    } else {
      detail::refuse_sliced_clone(typeid(Impl));
    }
  }

 private:
  CheckpointedImpl(const Impl& impl, const detail::ModuleRegion& region)
      : Base(typeid(CheckpointedImpl), impl, region) {}
};

/// The holder of a checkpointed module, like one made by `TORCH_MODULE`:
///
///     remat::Checkpointed<BlockImpl> block(remat::ModuleOptions{.level = 2}, 512, 8);
///
/// The arguments of `BlockImpl`'s constructor follow the options, which may be omitted. The module
/// works inside `torch::nn::Sequential` and `AnyModule`, and clones, saves and loads as the plain
/// module does.
///
/// A call runs `Impl::forward` as a region (`checkpoint()` says what stays in memory). It runs
/// plainly if it is switched off, without grad mode, under a `DisableCheckpointGuard`, and in eval
/// mode unless `training_only` is false. A recompute sees the training flags of the module and of
/// all its children as forward did; `BufferPolicy` says how it treats buffers. The graph keeps the
/// module alive, so a module that stores its own output makes a cycle. `Impl::forward` is usually
/// not virtual; a call through a plain `Impl&` or `shared_ptr<Impl>` is then not checkpointed.
/// Threads: any. Recomputes in several threads that restore the same buffers take turns; a forward
/// that writes them during such a recompute may lose its values.
/// Throws: the errors of `checkpoint()`; `c10::ValueError` if no shared pointer owns the module.
/// Sources: fairscale's `checkpoint_wrapper`, MONAI's U-Net, the levels of vision_architectures.
/// Example: examples/unet.cpp.
template <class ImplType>
class Checkpointed : public torch::nn::ModuleHolder<CheckpointedImpl<ImplType>> {
 public:
  using Impl = CheckpointedImpl<ImplType>;  ///< the module type that the holder holds
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  /// Accepts calls that rely on default arguments of `ImplType::forward` too.
  template <class... Args>
  auto operator()(Args&&... args) {
    return this->get()->run_checkpointed(std::forward<Args>(args)...);
  }
};

/// Returns the type of a module without its region: `Impl` for a `Checkpointed<Impl>`, otherwise
/// `typeid(module)`. Use it where a program distinguishes modules by type, such as for the
/// initialization of weights. `module.as<Impl>()` and dynamic_cast find an `Impl` in both.
REMAT_API const std::type_info& module_type(const torch::nn::Module& module);

/// Switches every `Checkpointed` in a tree of modules, `root` among them.
REMAT_API void set_checkpointing(torch::nn::Module& root, bool enabled);

/// Switches the modules by level: a module is on if `training_level >= level` and `level > 0`.
/// Common levels: 0 none, 1 layers, 2 residual, attention and MLP blocks, 3 transformer layers, 4
/// stages, 5 encoders.
REMAT_API void set_checkpoint_level(torch::nn::Module& root, int64_t training_level);

}  // namespace remat
