// Definitions of module.h: the options and the switch of a checkpointed module.

#include "remat/module.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/nn/modules/container/sequential.h>

#include <mutex>
#include <string>
#include <thread>
#include <typeindex>
#include <unordered_map>

#include "lib/base/once_per_name.h"
#include "lib/entry/module_function.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/module_access.h"
#include "lib/seam/stand_in.h"
#include "lib/seam/warn.h"
#include "lib/state/module_state.h"
#include "lib/state/user_state.h"

namespace remat {

namespace detail {

namespace {

// Note [Options of a cloned child]
// A parent's clone (torch::nn::Cloneable) makes new children in reset(), asks each original child
// for a clone(), and assigns that to the new child as an `Impl`. LibTorch does not know the class
// above `Impl`, the function is final, and the assignment is not virtual, so our options would be
// lost. The assignment copies only Module's own fields.
// Our clone() therefore writes a unique name into the clone. The clone dies right after the
// assignment. The module of this thread that then has the same name is the target of the
// assignment, and gets the options. A clone that lives on has that name until its first call. There
// are no other visible effects.
class LiveRegions {
 public:
  struct Entry {
    ModuleRegion* region;
    torch::nn::Module* module;
    std::thread::id thread;
    std::type_index type;
  };

  void add(ModuleRegion& region, torch::nn::Module& module, const std::type_info& type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.emplace(&region, Entry{&region, &module, std::this_thread::get_id(), type});
  }
  void remove(const ModuleRegion& region) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(&region);
  }
  /// Calls `found` with the other module of this type and thread that has the same name.
  template <class Found>
  void find_namesake(const ModuleRegion& region, const std::string& name, Found&& found) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto self = all_.find(&region);
    for (auto& [address, entry] : all_)
      if (address != &region && entry.thread == std::this_thread::get_id() &&
          entry.type == self->second.type && ModuleAccess::name(*entry.module) == name)
        return found(*entry.region, *entry.module);
  }
  std::string new_name(const std::type_info& type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return c10::demangle(type.name()) + " (clone " + std::to_string(++num_clones_) + ")";
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const ModuleRegion*, Entry> all_;
  int64_t num_clones_ = 0;
};

LiveRegions& live_regions() {
  static auto* const all = new LiveRegions;  // leaked: modules may die in static destructors
  return *all;
}

}  // namespace

ModuleRegion::ModuleRegion(torch::nn::Module& owner, const std::type_info& type,
                           ModuleOptions options)
    : owner_(&owner), type_(type), enabled_(options.enabled && options.level > 0) {
  set_options(std::move(options));
  live_regions().add(*this, owner, type);
}

ModuleRegion::ModuleRegion(torch::nn::Module& owner, const std::type_info& type,
                           const ModuleRegion& other)
    : owner_(&owner), type_(type), options_(other.options_), enabled_(other.is_enabled()) {
  live_regions().add(*this, owner, type);
}

void ModuleRegion::set_options(ModuleOptions options) {
  TORCH_CHECK_VALUE(options.level >= 0, "remat::Checkpointed: ModuleOptions::level was ",
                    options.level,
                    ". Hint: set 0 for never, or the checkpoint level from which "
                    "the module is a region (1 or more).");
  // The policy can be set in two places; the region and its warnings read the one in its options.
  if (options.buffers == BufferPolicy::Restore) options.buffers = options.checkpoint.buffers;
  options.checkpoint.buffers =
      options.buffers == BufferPolicy::Ignore ? BufferPolicy::Ignore : BufferPolicy::Restore;
  options_ = std::make_shared<const ModuleOptions>(std::move(options));
}

ModuleRegion::~ModuleRegion() {
  if (was_cloned_)
    live_regions().find_namesake(*this, *ModuleAccess::name(*owner_),
                                 [this](ModuleRegion& child, torch::nn::Module& module) {
                                   child.adopt(*this);
                                   ModuleAccess::name(module).reset();
                                 });
  live_regions().remove(*this);
}

ModuleRegion& ModuleRegion::operator=(const ModuleRegion& other) {
  adopt(other);
  return *this;
}

void ModuleRegion::adopt(const ModuleRegion& other) {
  options_ = other.options_;
  enabled_ = other.is_enabled();
}

void ModuleRegion::was_cloned() {
  was_cloned_ = true;
  ModuleAccess::name(*owner_) = live_regions().new_name(type_);
}

std::shared_ptr<torch::nn::Module> ModuleRegion::owner() const {
  auto owner = owner_->weak_from_this().lock();
  TORCH_CHECK_VALUE(
      owner != nullptr, "remat::Checkpointed: a ", c10::demangle(type_.name()),
      " was called, but no shared pointer owns it. Cause: backward runs the module again, so the "
      "graph must keep it alive. Hint: create it with remat::Checkpointed or std::make_shared.");
  return owner;
}

bool ModuleRegion::is_wanted() {
  if (was_cloned_) {
    was_cloned_ = false;  // it is no temporary clone: Note [Options of a cloned child]
    ModuleAccess::name(*owner_).reset();
  }
  if (!is_on() || !c10::GradMode::is_enabled()) return false;
  if (!was_called_.load(std::memory_order_relaxed)) was_called_ = true;
  if (!opens_region()) return false;
  if (options_->buffers != BufferPolicy::SkipBatchNorm || !contains_batch_norm(*owner_))
    return true;
  if (!has_warned_.exchange(true)) warn_of_batch_norm(c10::demangle(type_.name()));
  return false;
}

bool ModuleRegion::is_on() const {
  return enabled_ && (!options_->training_only || owner_->is_training());
}

bool ModuleRegion::is_off_in_eval() const {
  return enabled_ && options_->training_only && !owner_->is_training() && !is_watched() &&
         opens_region();
}

namespace {

/// Warns when a backward reaches the node of a tensor.
class WarnInEval final : public torch::autograd::FunctionPreHook {
 public:
  explicit WarnInEval(std::string type) : type_(std::move(type)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (warned_in_eval().is_first(type_))
      seam::warn(c10::str(
          "remat: a backward went through a ", type_,
          " in eval mode, which ran without a region: everything that autograd saved in it was "
          "kept. Hint: ModuleOptions::training_only = false, if its gradients are wanted in eval "
          "mode (forces, for example)."));
    return grads;
  }
  static OncePerName& warned_in_eval() {
    static OncePerName types;
    return types;
  }

 private:
  const std::string type_;
};

}  // namespace

void ModuleRegion::watch_result(const at::Tensor& result) const {
  if (!result.defined() || result.grad_fn() == nullptr) return;
  result.grad_fn()->add_pre_hook(std::make_unique<WarnInEval>(c10::demangle(type_.name())));
}

bool ModuleRegion::is_watched() const { return innermost(Ability::Region) != nullptr; }

void ModuleRegion::set_training_level(int64_t level) {
  enable(options_->level > 0 && level >= options_->level);
}

ModuleStateGuard::ModuleStateGuard(const ModuleRegion& region)
    : ModuleStateGuard([&] {
        auto all = std::make_shared<UserRegistrations>();
        add_registrations(*all, *region.owner_, region.options_->buffers);
        all->running = region.owner_->weak_from_this();
        return all;
      }()) {}

ModuleStateGuard::ModuleStateGuard(std::shared_ptr<const UserRegistrations> registrations)
    : ScopeGuard(scope_that_registers(registrations)) {
  tell_regions_around(*registrations);
}

HasModuleRegion::~HasModuleRegion() = default;

ModuleRegion* region_of(torch::nn::Module& module) {
  auto* const has = dynamic_cast<HasModuleRegion*>(&module);
  return has != nullptr ? &has->remat_region() : nullptr;
}

void refuse_sliced_clone(const std::type_info& wanted) {
  TORCH_CHECK(false, "remat::Checkpointed: the clone() of a module did not return a ",
              c10::demangle(wanted.name()),
              ". Cause: the module inherits clone() from a base class. Hint: derive it from "
              "torch::nn::Cloneable of its own type, or override clone().");
}

template <class Do>
void for_each_region(torch::nn::Module& root, Do&& change) {
  root.apply(std::function<void(torch::nn::Module&)>([&](torch::nn::Module& module) {
    if (ModuleRegion* region = region_of(module)) change(*region);
    if (auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module))
      for (torch::nn::AnyModule& element : *sequential)
        if (const auto stand_in = seam::stand_in_of(element)) change(*region_of(*stand_in));
  }));
}

}  // namespace detail

const std::type_info& module_type(const torch::nn::Module& module) {
  const auto* const has = dynamic_cast<const detail::HasModuleRegion*>(&module);
  return has != nullptr ? has->plain_type() : typeid(module);
}

void set_checkpointing(torch::nn::Module& root, bool enabled) {
  detail::for_each_region(root, [&](detail::ModuleRegion& region) { region.enable(enabled); });
}

void set_checkpoint_level(torch::nn::Module& root, int64_t training_level) {
  detail::for_each_region(
      root, [&](detail::ModuleRegion& region) { region.set_training_level(training_level); });
}

}  // namespace remat
