#include "lib/selective/operator_names.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "lib/seam/warn.h"
#include "lib/selective/op_traits.h"

namespace remat {

namespace {

/// All operators by their name without overload. There are thousands, and policies are often made
/// where they are used. The index is therefore built once, and again when a name is not found,
/// since a library may have been loaded since. It holds names and not handles, because operators of
/// an unloaded library are gone.
class OperatorIndex {
 public:
  std::vector<c10::OperatorHandle> named(const std::string& base) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<c10::OperatorHandle> ops = registered(base);
    if (!ops.empty()) return ops;
    NamesByBase all;
    for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames())
      all[each.name].push_back(each);
    by_base_ = std::move(all);
    return registered(base);
  }

 private:
  using NamesByBase = std::unordered_map<std::string, std::vector<c10::OperatorName>>;

  std::vector<c10::OperatorHandle> registered(const std::string& base) const {
    std::vector<c10::OperatorHandle> ops;
    const auto found = by_base_.find(base);
    if (found == by_base_.end()) return ops;
    for (const c10::OperatorName& each : found->second)
      if (const auto op = c10::Dispatcher::singleton().findSchema(each)) ops.push_back(*op);
    return ops;
  }

  std::mutex mutex_;
  NamesByBase by_base_;
};

/// Returns a hint with the registered names that differ from `name` only in the namespace or the
/// overload.
std::string similar_names(const std::string& name) {
  const std::string base = name.substr(0, name.find('.'));
  const std::string bare =
      base.substr(base.rfind(':') == std::string::npos ? 0 : base.rfind(':') + 1);
  std::vector<std::string> similar;
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string other = each.name.substr(each.name.rfind(':') + 1);
    if (other != bare) continue;
    similar.push_back(each.name + "." +
                      (each.overload_name.empty() ? "default" : each.overload_name));
    if (similar.size() == 6) break;
  }
  std::sort(similar.begin(), similar.end());
  return similar.empty() ? "" : fmt::format(" Registered operators: {}.", fmt::join(similar, ", "));
}

}  // namespace

std::vector<c10::OperatorHandle> operators_named(const std::string& name) {
  static auto* const index = new OperatorIndex;  // leaked: handles outlive static destruction
  const std::size_t dot = name.find('.');
  std::vector<c10::OperatorHandle> ops = index->named(name.substr(0, dot));
  if (dot == std::string::npos) return ops;
  const std::string overload = name.substr(dot + 1);
  std::erase_if(ops, [&](const c10::OperatorHandle& op) {
    return op.operator_name().overload_name != (overload == "default" ? "" : overload);
  });
  return ops;
}

std::vector<uint32_t> numbers_of_operators(const std::string& name, const char* function) {
  const auto ops = operators_named(name);
  TORCH_CHECK_VALUE(!ops.empty(), "remat::", function, ": there is no operator \"", name, "\".",
                    similar_names(name),
                    " Hint: use a registered name, such as \"aten::mm\" (every overload), "
                    "\"aten::add.Tensor\" (one) or \"aten::mm.default\" (the unnamed one).");
  std::vector<uint32_t> numbers;
  bool can_be_kept = false, is_composite = false;
  for (const c10::OperatorHandle& op : ops) {
    const OpTraits& traits = traits_of(op);
    numbers.push_back(traits.name_number);
    is_composite = is_composite || traits.is_composite;
    can_be_kept = can_be_kept || (!traits.is_composite && traits.can_be_kept());
  }
  if (can_be_kept) return numbers;
  const char* const reason =
      is_composite
          ? "\" is composed of other operators, and a policy sees only those. Hint: list these "
            "operators; a policy function sees their names."
          : "\" writes to an argument, returns a view of an argument or creates an "
            "uninitialized tensor, so it always runs again. Hint: list the operator that "
            "computes the values.";
  seam::warn(c10::str("remat::", function, ": \"", name, reason));
  return numbers;
}

}  // namespace remat
