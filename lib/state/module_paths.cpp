#include "lib/state/module_paths.h"

#include <c10/util/flat_hash_map.h>
#include <torch/nn/module.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "lib/base/spin_lock.h"
#include "lib/scope/hook_stack.h"
#include "lib/state/user_state.h"
#include "lib/tensor/capture.h"
#include "remat/paths.h"

namespace remat {

namespace {

std::atomic<detail::PathSource*> path_source{nullptr};

/// The registered modules and parameters, by address. They are held weakly, so that no address is
/// taken for another object's.
class ModulePaths {
 public:
  void add(const torch::nn::Module& root) {
    const std::lock_guard<SpinLock> lock(mutex_);
    std::erase_if(modules_, [](const auto& each) { return each.second.module.expired(); });
    std::erase_if(parameters_, [](const auto& each) { return each.second.object.expired(); });
    add(root, "");
  }
  const std::string* path_of(const torch::nn::Module& module) const {
    const std::lock_guard<SpinLock> lock(mutex_);
    const auto found = modules_.find(&module);
    return found == modules_.end() || found->second.module.expired() ? nullptr : found->second.path;
  }
  ParameterPath path_of(const at::Tensor& parameter) const {
    const std::lock_guard<SpinLock> lock(mutex_);
    const auto found = parameters_.find(parameter.unsafeGetTensorImpl());
    return found == parameters_.end() || found->second.object.expired() ? ParameterPath()
                                                                        : found->second.path;
  }
  void visit(c10::function_ref<void(const std::string&)> visitor) const {
    const std::lock_guard<SpinLock> lock(mutex_);
    for (const auto& [address, each] : modules_)
      if (!each.module.expired()) visitor(*each.path);
  }

 private:
  struct KnownModule {
    std::weak_ptr<const torch::nn::Module> module;
    const std::string* path;
  };
  struct KnownParameter {
    WeakTensor object;
    ParameterPath path;
  };
  void add(const torch::nn::Module& module, const std::string& path) {
    const std::string& own = detail::path_of_text(path);
    modules_[&module] = {module.weak_from_this(), &own};
    const std::string prefix = path.empty() ? "" : path + ".";
    for (const auto& each : module.named_parameters(/*recurse=*/false))
      if (each.value().defined())
        parameters_.insert_or_assign(
            each.value().unsafeGetTensorImpl(),
            KnownParameter{WeakTensor(each.value().getIntrusivePtr()),
                           {&detail::path_of_text(prefix + each.key()), &own}});
    for (const auto& child : module.named_children()) add(*child.value(), prefix + child.key());
  }

  mutable SpinLock mutex_;
  std::unordered_map<const torch::nn::Module*, KnownModule> modules_;
  std::unordered_map<const c10::TensorImpl*, KnownParameter> parameters_;
};

ModulePaths& module_paths() {
  static auto* const all = new ModulePaths;  // leaked: regions may run in static destructors
  return *all;
}

}  // namespace

void register_tree(const torch::nn::Module& root) { module_paths().add(root); }

namespace detail {

void set_path_source(PathSource& source) { path_source.store(&source); }

const std::string& path_of_text(std::string_view text) {
  static std::mutex mutex;
  static auto* const all = new std::unordered_set<std::string>;  // leaked, as the paths are
  const std::lock_guard<std::mutex> lock(mutex);
  return *all->emplace(text).first;
}

}  // namespace detail

ParameterPath path_of_parameter(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const at::Tensor* const leaf = leaf_behind(tensor);
  const at::Tensor& parameter = leaf != nullptr ? *leaf : seam::viewed(tensor);
  if (leaf == nullptr && seam::node_of(parameter) != nullptr) return {};
  if (const ParameterPath found = module_paths().path_of(parameter); found.parameter != nullptr)
    return found;
  detail::PathSource* const source = path_source.load();
  const std::string* const path = source == nullptr ? nullptr : source->parameter_path(parameter);
  if (path == nullptr) return {};
  const auto dot = path->rfind('.');
  const std::string_view owner(path->data(), dot == path->npos ? 0 : dot);
  return {path, &detail::path_of_text(owner)};
}

const std::string* path_in_binding() {
  detail::PathSource* const source = path_source.load();
  return source == nullptr ? nullptr : source->module_path();
}

RunningModule running_module() {
  std::shared_ptr<torch::nn::Module> innermost, outermost;
  detail::visit(detail::Ability::State, [&](detail::Scope& scope) {
    const auto registered = scope.registered_state();
    auto module = registered == nullptr ? nullptr : registered->running.lock();
    if (module == nullptr) return;
    if (innermost == nullptr) innermost = module;
    outermost = std::move(module);
  });
  if (innermost == nullptr) return {};
  if (const std::string* const path = module_paths().path_of(*innermost)) return {path};
  if (module_paths().path_of(*outermost) != nullptr) return {};  // made since the registration
  register_tree(*outermost);
  return {module_paths().path_of(*innermost), /*is_new=*/true};
}

bool is_in_tree(const torch::nn::Module& module) {
  return module_paths().path_of(module) != nullptr;
}

void visit_module_paths(c10::function_ref<void(const std::string&)> visitor) {
  module_paths().visit(visitor);
  if (detail::PathSource* const source = path_source.load()) source->visit_paths(visitor);
}

}  // namespace remat
