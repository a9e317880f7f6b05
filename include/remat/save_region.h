#pragma once
// Values and calls of a region that its recomputes take as forward left them, without a policy.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "remat/call.h"
#include "remat/export.h"

namespace remat {

/// Returns `x` and, inside a region, keeps its value: recomputes continue with the kept value
/// instead of their own. Use it for discrete decisions (the indices of topk, a routing mask, a
/// sample) that rounding could flip. Memory: that of `x`, as long as the region's frame lives.
/// Throws, in the recompute, if `x` was changed in place. A gradient that is taken inside the
/// recompute through the pinned value throws (Unsupported). So does a gradient of the pinned value
/// if `x` itself is used as well.
REMAT_API at::Tensor pin(const at::Tensor& x);

namespace detail {

/// One call of save_region(), with the values that it keeps.
class REMAT_API SavedRegion {
 public:
  /// Begins the call. `name`: for the region's policy, or empty. `type`: the type to which
  /// `emptied` points. `visit_arguments` visits the arguments of the function. May end a recompute.
  SavedRegion(const std::string& name, const std::type_info& type,
              c10::function_ref<void(TensorVisitor)> visit_arguments);
  ~SavedRegion();
  SavedRegion(const SavedRegion&) = delete;
  SavedRegion& operator=(const SavedRegion&) = delete;
  /// Returns true in a recompute that has the kept result: the function must not run.
  bool is_kept() const;
  /// Returns the `Emptied` of the result's type, null for void; `tensors` returns its tensors.
  void* emptied() const;
  std::vector<at::Tensor> tensors();
  /// Keeps `emptied` and the tensors that `visit_tensors` visits. Call it after the function has
  /// run.
  void keep(std::shared_ptr<void> emptied, c10::function_ref<void(TensorVisitor)> visit_tensors);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null outside of regions
};

}  // namespace detail

/// Returns `fn(args...)`. Inside a region it keeps the result and the tensors that autograd saves
/// in the call, so that `fn` does not run again. Use it for kernels that no operator policy sees:
/// custom Functions, calls that bypass the dispatcher, communication.
///
/// With a name the region's policy decides (`save_names`, `policy_table`, a function that sees
/// `remat::save_region` and the name): if it keeps the name, the call is kept; otherwise `fn` is an
/// ordinary part of the region. Without a policy, or with one that has no names, the call is kept.
///
/// Memory: the results, and the tensors saved in `fn` except its arguments, as long as the region's
/// frame lives. An argument that `fn` saves or returns is not kept: the recompute has it when it
/// reaches the call. Results are released at the region's end if no tensor was saved after the
/// call, since recomputes end before they need them. If such a recompute cannot end there (a
/// noexcept function is on the stack), `fn` runs again.
///
/// The result belongs to the innermost region; if the recompute of an enclosing region runs that
/// region's forward again, `fn` runs again. So it does in each recompute if it writes to an
/// argument. Types: as for `checkpoint`, and the result must be copyable. A gradient that is taken
/// inside the recompute through the result throws (Unsupported). So does a gradient of tensors
/// older than the result, if `fn` read tensors that require grad and are not its arguments.
template <class Fn, class... Args>
auto save_region(std::string name, Fn&& fn, Args&&... args) {
  using Result = std::decay_t<decltype(detail::call(fn, std::forward<Args>(args)...))>;
  const auto visit_arguments = [&]([[maybe_unused]] TensorVisitor visitor) {
    (detail::Tensors<std::decay_t<Args>>::visit(const_cast<std::decay_t<Args>&>(args), visitor),
     ...);
  };
  if constexpr (std::is_void_v<Result>) {
    detail::SavedRegion region(name, typeid(void), visit_arguments);
    if (region.is_kept()) return;
    detail::call(fn, std::forward<Args>(args)...);
    region.keep(nullptr, [](TensorVisitor) {});
  } else {
    static_assert(std::copy_constructible<Result>,
                  "remat::save_region: the result must be copyable, since each recompute gets a "
                  "copy of it");
    detail::SavedRegion region(name, typeid(detail::Emptied<Result>), visit_arguments);
    if (region.is_kept()) {
      std::vector<at::Tensor> tensors = region.tensors();
      return static_cast<detail::Emptied<Result>*>(region.emptied())->filled(tensors);
    }
    Result result = detail::call(fn, std::forward<Args>(args)...);
    auto emptied = std::make_shared<detail::Emptied<Result>>(std::as_const(result));
    region.keep(emptied, [&](TensorVisitor visitor) { emptied->visit(visitor); });
    return result;
  }
}

/// Does the same for a call without a name, which is always kept.
template <class Fn, class... Args>
  requires(!std::convertible_to<Fn, std::string>)
auto save_region(Fn&& fn, Args&&... args) {
  return save_region(std::string(), std::forward<Fn>(fn), std::forward<Args>(args)...);
}

}  // namespace remat
