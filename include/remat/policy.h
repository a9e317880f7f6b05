#pragma once
// Which operators of a region keep their result: the vocabulary of selective checkpointing.

#include <c10/util/ArrayRef.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "remat/export.h"

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace remat {

/// What a policy answers for one operator call. In eager execution Prefer* acts as Must*, except
/// that `PreferCpuOffload` falls back to keeping the tensor where it is when it cannot be moved.
enum class CheckpointPolicy {
  MustSave,
  PreferSave,
  MustRecompute,
  PreferRecompute,
  MustCpuOffload,
  PreferCpuOffload
};

/// One question to a policy. All references are valid during the call only.
struct PolicyContext {
  const c10::OperatorHandle& op;
  std::string_view op_name;         ///< "aten::mm.default"
  c10::ArrayRef<c10::IValue> args;  ///< the operator's arguments
  bool is_recompute;                ///< asked in a recompute (only with `ask_again`)
  const std::string& name;          ///< the value's name, empty unless it was given one
};

using PolicyFn = std::function<CheckpointPolicy(const PolicyContext&)>;

struct SelectiveOptions {
  bool allow_cache_entry_mutation = false;  ///< a kept result may be changed in place later
  bool save_through_hooks = false;          ///< kept results pass the hooks around the region
  bool ask_again = false;                   ///< ask the policy in the recompute too
};

/// A policy function with its options; empty means "recompute everything". Copies share the
/// function, which may be called from any thread that runs a region.
class REMAT_API Policy {
 public:
  Policy();
  Policy(PolicyFn fn, SelectiveOptions options = {});
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, Policy>) && std::convertible_to<F, PolicyFn>
  Policy(F&& fn) : Policy(PolicyFn(std::forward<F>(fn))) {}

  /// Whether there is a function to ask.
  explicit operator bool() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace remat
