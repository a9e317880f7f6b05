#include "lib/selective/op_traits.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "lib/seam/dispatch_mode.h"

namespace remat {

namespace {

// Operators of autograd and views: the list SAC_IGNORED_OPS of torch/utils/checkpoint.py, with the
// metadata operators that have a name in C++.
constexpr std::array<std::string_view, 25> passive_names{"aten::detach",
                                                         "aten::alias",
                                                         "aten::lift_fresh",
                                                         "prim::device",
                                                         "prim::layout",
                                                         "aten::dim",
                                                         "aten::numel",
                                                         "aten::size",
                                                         "aten::stride",
                                                         "aten::storage_offset",
                                                         "aten::is_contiguous",
                                                         "aten::is_strides_like_format",
                                                         "aten::is_non_overlapping_and_dense",
                                                         "aten::sym_size",
                                                         "aten::sym_stride",
                                                         "aten::sym_numel",
                                                         "aten::sym_storage_offset",
                                                         "aten::is_pinned",
                                                         "aten::sym_is_contiguous",
                                                         "aten::is_same_size",
                                                         "aten::_version",
                                                         "aten::is_set_to",
                                                         "aten::_nested_tensor_size",
                                                         "aten::_nested_tensor_strides",
                                                         "aten::_nested_tensor_storage_offsets"};

// The collectives of c10d write to their first argument, which their schemas do not declare; `send`
// and the barriers write to none. The functional ones have complete schemas.
constexpr std::array<std::string_view, 4> collective_libraries{
    "c10d::", "_c10d_functional::", "c10d_functional::", "_dtensor::shard_dim_alltoall"};
constexpr std::array<std::string_view, 4> local_names{
    "c10d::check_for_nan", "_c10d_functional::wait_tensor", "c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd"};

// Operators of forward that torch.use_deterministic_algorithms warns of or replaces on an
// accelerator, and those that choose among equal elements.
constexpr std::array<std::string_view, 23> nondeterministic_names{
    "aten::index_add",    "aten::index_copy",   "aten::index_put",      "aten::index_reduce",
    "aten::put",          "aten::scatter_add",  "aten::scatter_reduce", "aten::histc",
    "aten::bincount",     "aten::cumsum",       "aten::_ctc_loss",      "aten::nll_loss2d_forward",
    "aten::max_unpool2d", "aten::max_unpool3d", "aten::_embedding_bag", "aten::topk",
    "aten::sort",         "aten::argsort",      "aten::kthvalue",       "aten::median",
    "aten::mode",         "aten::argmax",       "aten::argmin"};

template <class Names>
bool is_one_of(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

uint8_t kinds_of(const c10::OperatorHandle& op, bool draws) {
  const std::string& name = op.operator_name().name;
  const bool is_collective =
      !is_one_of(local_names, name) &&
      std::any_of(collective_libraries.begin(), collective_libraries.end(),
                  [&](std::string_view library) { return name.rfind(library, 0) == 0; });
  return static_cast<uint8_t>(
      (is_collective ? OpKind::Collective : 0) | (draws ? OpKind::Random : 0) |
      (is_one_of(nondeterministic_names, name) ? OpKind::Nondeterministic : 0) |
      (name == "aten::_to_copy" || name == "aten::_local_scalar_dense" ? OpKind::HostCopy : 0));
}

OpTraits find_traits(const c10::OperatorHandle& op) {
  OpTraits traits;
  const c10::OperatorName& name = op.operator_name();
  traits.name = name.name + "." + (name.overload_name.empty() ? "default" : name.overload_name);
  traits.is_passive =
      std::find(passive_names.begin(), passive_names.end(), name.name) != passive_names.end();
  const c10::FunctionSchema& schema = op.schema();
  traits.is_cast = traits.name == "aten::_to_copy.default";
  traits.is_mutable = schema.is_mutable();
  for (const c10::Argument& result : schema.returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) traits.is_view = true;
  // These share the storage, although their schemas do not declare it.
  if (name.name == "aten::_unsafe_view" || name.name == "aten::_reshape_alias")
    traits.is_view = true;
  for (const char* prefix : {"aten::", "aten::new_"})
    for (const char* blank : {"empty", "zeros", "ones", "full"})
      traits.is_blank = traits.is_blank || name.name.rfind(std::string(prefix) + blank, 0) == 0;
  traits.keys_met = seam::keys_met(op);
  traits.is_composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  traits.is_factory = true;
  for (const c10::Argument& argument : schema.arguments()) {
    const std::string type = argument.type()->str();
    if (type.find("Tensor") != std::string::npos) traits.is_factory = false;
    if (argument.name() == "generator") traits.is_random = true;
  }
  for (const std::string_view constant : {"aten::zeros_like", "aten::ones_like", "aten::full_like",
                                          "aten::new_zeros", "aten::new_ones", "aten::new_full"})
    if (name.name == constant) traits.is_factory = true;
  for (const std::string_view unfilled : {"aten::empty", "aten::new_empty"})
    if (name.name.rfind(unfilled, 0) == 0) traits.is_factory = true;
  for (const std::string_view norm :
       {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})
    if (name.name == norm) traits.is_batch_norm = true;
  const bool draws = traits.is_random || op.hasTag(at::Tag::nondeterministic_seeded);
  traits.kinds = kinds_of(op, draws);
  traits.writes_first = name.name.rfind("c10d::", 0) == 0 && name.name.back() == '_' &&
                        name.name != "c10d::monitored_barrier_";
  const bool is_ours = name.name.rfind("aten::", 0) == 0 || name.name.rfind("prim", 0) == 0;
  traits.is_random = draws || !is_ours;
  return traits;
}

}  // namespace

bool OpTraits::has_side_effect(c10::ArrayRef<c10::IValue> arguments) const {
  if (!is_batch_norm) return false;
  constexpr std::size_t running_mean = 3, training = 5;
  return arguments.size() > training && arguments[running_mean].isTensor() &&
         arguments[running_mean].toTensor().defined() && arguments[training].toBool();
}

bool copies_to_host(c10::ArrayRef<c10::IValue> arguments) {
  if (!arguments[0].isTensor() || !arguments[0].toTensor().defined() ||
      arguments[0].toTensor().is_cpu())
    return false;
  constexpr std::size_t device = 3;  // of _to_copy; _local_scalar_dense has no such argument
  return arguments.size() <= device ||
         (arguments[device].isDevice() && arguments[device].toDevice().is_cpu());
}

bool is_made_by(const c10::OperatorHandle& op, std::size_t result) {
  return op.schema().returns()[result].alias_info() == nullptr;
}

namespace {

/// Number of removed operators. See Note [Operators that come and go].
std::atomic<uint64_t> num_gone{0};

class AllTraits {
 public:
  // The object is leaked: threads may end after static destructors.
  static AllTraits& get() {
    static auto* const all = new AllTraits;
    return *all;
  }

  const OpTraits& of(const c10::OperatorHandle& op) {
    // The dispatcher is asked before our lock: it holds its own lock when it reports a removed
    // operator.
    auto found = std::make_unique<OpTraits>(find_traits(op));
    const std::lock_guard<std::mutex> lock(mutex_);
    const OpTraits*& place = now_[op];
    if (place == nullptr) {
      found->name_number =
          name_numbers_.emplace(found->name, static_cast<uint32_t>(name_numbers_.size()))
              .first->second;
      place = ever_.emplace_back(std::move(found)).get();
    }
    return *place;
  }

 private:
  class Listener final : public c10::OpRegistrationListener {
   public:
    explicit Listener(AllTraits& all) : all_(all) {}
    void onOperatorRegistered(const c10::OperatorHandle&) override {}
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      const std::lock_guard<std::mutex> lock(all_.mutex_);
      all_.now_.erase(op);
      num_gone.fetch_add(1, std::memory_order_release);
    }

   private:
    AllTraits& all_;
  };

  AllTraits()
      : listening_(c10::Dispatcher::singleton().addRegistrationListener(
            std::make_unique<Listener>(*this))) {}

  std::mutex mutex_;
  std::unordered_map<c10::OperatorHandle, const OpTraits*> now_;
  std::deque<std::unique_ptr<const OpTraits>>
      ever_;  // references stay valid after an operator is removed
  std::unordered_map<std::string, uint32_t> name_numbers_;
  const c10::RegistrationHandleRAII listening_;
};

}  // namespace

const OpTraits& traits_of(const c10::OperatorHandle& op) {
  thread_local ska::flat_hash_map<c10::OperatorHandle, const OpTraits*> known;
  thread_local uint64_t num_gone_then = 0;
  if (const uint64_t now = num_gone.load(std::memory_order_acquire); now != num_gone_then) {
    known.clear();
    num_gone_then = now;
  }
  if (const auto found = known.find(op); found != known.end()) return *found->second;
  const OpTraits& traits = AllTraits::get().of(op);
  known.emplace(op, &traits);
  return traits;
}

}  // namespace remat
