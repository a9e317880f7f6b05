#include "lib/entry/module_function.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <functional>
#include <utility>

#include "lib/base/once_per_name.h"
#include "lib/base/planted_fault.h"
#include "lib/scope/hook_stack.h"
#include "lib/seam/script.h"
#include "lib/seam/warn.h"
#include "remat/checkpoint.h"

namespace remat {

namespace {

/// While alive, makes regions that begin on this thread restore the registered state.
class ModulesGuard : detail::ScopeGuard {
 public:
  explicit ModulesGuard(std::shared_ptr<const UserRegistrations> registrations)
      : ScopeGuard(scope_that_registers(std::move(registrations))) {}
};

template <class Visitor>
void visit_modules_of(const CheckpointOptions& options, torch::nn::Module* module,
                      Visitor&& visitor) {
  if (module != nullptr) visitor(*module);
  for (const auto& named : options.modules) {
    TORCH_CHECK_VALUE(named != nullptr,
                      "remat::checkpoint: a module in CheckpointOptions::modules was null. Hint: "
                      "list existing modules; for a holder, list holder.ptr().");
    visitor(*named);
  }
}

}  // namespace

void warn_of_batch_norm(const std::string& type) {
  seam::warn(c10::str(
      "remat: Activation checkpointing skipped for a subblock containing BatchNorm (", type,
      "), as BufferPolicy::SkipBatchNorm asks. BufferPolicy::Restore checkpoints it and "
      "keeps its running statistics right."));
}

void add_registrations(UserRegistrations& all, torch::nn::Module& module, BufferPolicy buffers) {
  const auto flags = std::make_shared<TrainingFlags>(module, buffers != BufferPolicy::Ignore);
  all.add(flags);
  if (!flags->has_buffers()) return;
  if (all.providers.empty())
    all.providers = buffers_of(module);
  else
    for (const auto& each : buffers_of(module)) all.add(each);
}

std::shared_ptr<const UserRegistrations> register_modules(const CheckpointOptions& options,
                                                          torch::nn::Module* module,
                                                          const torch::jit::Module* script) {
  if (module == nullptr && script == nullptr && options.modules.empty()) return nullptr;
  auto all = std::make_shared<UserRegistrations>();
  visit_modules_of(options, module, [&](torch::nn::Module& each) {
    add_registrations(*all, each, options.buffers);
  });
  if (module != nullptr) all->running = module->weak_from_this();
  if (script != nullptr)
    for (const auto& provider : state_of(*script, options.buffers == BufferPolicy::Ignore))
      all->add(provider);
  tell_regions_around(*all);
  return all;
}

std::shared_ptr<void> register_plain_call(const CheckpointOptions& options,
                                          torch::nn::Module* module,
                                          const torch::jit::Module* script) {
  return watch_modules(register_modules(options, module, script));
}

std::shared_ptr<void> watch_modules(std::shared_ptr<const UserRegistrations> own) {
  return own == nullptr ? nullptr : std::make_shared<ModulesGuard>(std::move(own));
}

namespace detail {

std::shared_ptr<const void> owner_of(const torch::nn::Module* module) {
  if (module == nullptr) return nullptr;
  return module->weak_from_this().lock();
}

void refuse_null_module() {
  TORCH_CHECK_VALUE(
      false,
      "remat::checkpoint: the module to call was a null pointer. Cause: as<T>(), ptr<T>() and "
      "dynamic casts return null if the module is of another type; an empty holder has a null "
      "pointer, too. Hint: name the module's own type (see typeid(module)), or create the module "
      "first.");
}

PlainCall runs_plainly(const CheckpointOptions& options, torch::nn::Module* module,
                       const torch::jit::Module* script) {
  if (is_planted(Fault::BufferInside)) return {!opens_region() || !opens_region(options)};
  // Also without grad mode, recomputes of an enclosing region repeat the module's writes.
  if (!opens_region() && innermost(Ability::Region) == nullptr) return {true};
  // Levels are for training, as the levels of modules are.
  const bool is_in_eval = (module != nullptr && !module->is_training()) ||
                          (script != nullptr && !script->is_training());
  if (!opens_region(options) || (options.level && is_in_eval))
    return {true, register_plain_call(options, module, script)};
  if (options.buffers != BufferPolicy::SkipBatchNorm) return {};
  std::string type;
  visit_modules_of(options, module, [&](torch::nn::Module& each) {
    if (type.empty() && contains_batch_norm(each)) type = c10::demangle(typeid(each).name());
  });
  if (type.empty() && script != nullptr && seam::calls_batch_norm(*script))
    type = script->type()->name()->qualifiedName();
  if (type.empty()) return {};
  static OncePerName warned;
  if (warned.is_first(options.name + '\n' + type)) warn_of_batch_norm(type);
  return {true, register_plain_call(options, module, script)};
}

}  // namespace detail

}  // namespace remat
