// Makes a program's modules, calls them in all ways that the library has, and records their state.

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>

#include "tests/fuzz/run.h"
#include "tests/support/stateful_module.h"

namespace fuzz {

using remat::testing::StatefulImpl;
using Form = ModuleSpec::Form;

/// A module, with the objects that its form needs.
class Stateful {
 public:
  Stateful(const ModuleSpec& spec, const Tensor& weight, bool all_values) {
    std::vector<remat::testing::State> states;
    for (const int state : spec.states) states.push_back(static_cast<remat::testing::State>(state));
    remat::ModuleOptions options;
    options.checkpoint.early_stop = spec.salt % 4 != 0;
    if (all_values) options.checkpoint.determinism_check = remat::DeterminismCheck::Values;
    if (spec.form == Form::Checkpointed) {
      checkpointed_ = std::make_shared<remat::CheckpointedImpl<StatefulImpl>>(
          options, states, spec.salt, weight, device());
      module_ = checkpointed_;
    } else {
      module_ = std::make_shared<StatefulImpl>(states, spec.salt, weight, device());
    }
    if (spec.form != Form::Applied) return;
    sequential_ = torch::nn::Sequential(module_);
    remat::require_checkpointing(*sequential_, {.name = "0"}, options);
  }

  /// Returns the module, or the Sequential around it.
  std::shared_ptr<torch::nn::Module> root() const {
    if (sequential_) return sequential_.ptr();
    return module_;
  }

  /// Calls the module without a region of its own.
  Tensor call_plainly(const Tensor& x) const { return module_->StatefulImpl::forward(x); }

  Tensor call(const remat::CheckpointOptions& options, const Tensor& x, uint64_t salt) const {
    const uint64_t way = salt % 4;
    if (checkpointed_)
      return way < 2 ? checkpointed_->forward(x) : remat::checkpoint(options, checkpointed_, x);
    if (sequential_) {
      torch::nn::Sequential sequential = sequential_;
      if (way < 2) return sequential->forward(x);
      if (way == 2) return remat::checkpoint(options, sequential, x);
      return remat::checkpoint_sequential(
          sequential, 1, x, {.checkpoint = options, .checkpoint_last = salt / 4 % 2 == 0});
    }
    if (way == 0) return remat::checkpoint(options, module_, x);
    if (way == 1) return remat::checkpoint(options, &StatefulImpl::forward, module_, x);
    remat::CheckpointOptions named = options;
    named.modules = {module_};
    return remat::checkpoint(
        named, [module = module_](const Tensor& t) { return module->forward(t); }, x);
  }

  StatefulImpl& module() { return *module_; }

 private:
  std::shared_ptr<StatefulImpl> module_;
  std::shared_ptr<remat::CheckpointedImpl<StatefulImpl>> checkpointed_;
  torch::nn::Sequential sequential_ = nullptr;
};

void Interpreter::make_modules() {
  for (const ModuleSpec& spec : program_.modules) {
    const Tensor& weight = leaves_[static_cast<size_t>(spec.weight)].tensor;
    auto made = std::make_shared<Stateful>(spec, weight, program_.all_values);
    if (spec.inner >= 0) {
      const auto inner = modules_[static_cast<size_t>(spec.inner)];
      made->module().set_inner(
          "inner", inner->root(), [inner, salt = spec.salt / 4](const Tensor& x) {
            return salt % 3 == 0 ? inner->call_plainly(x) : inner->call({}, x, salt / 3);
          });
    }
    modules_.push_back(std::move(made));
  }
}

void Interpreter::run_call(const Statement& s, Environment& values) {
  const Value& given = see(values, s.args[0]);
  const Stateful& module = *modules_[static_cast<size_t>(s.op)];
  given.origin->as_argument |= !s.region.inlined;
  for (int i = s.op; i >= 0; i = program_.modules[static_cast<size_t>(i)].inner)
    leaves_[static_cast<size_t>(program_.modules[static_cast<size_t>(i)].weight)]
        .origin->as_capture = true;
  const Tensor made = s.region.inlined ? module.call_plainly(given.tensor)
                                       : module.call(options(s.region), given.tensor, s.salt);
  values[s.out] = {made, std::make_shared<Origin>()};
}

void Interpreter::collect_modules(const Block& block,
                                  std::vector<std::shared_ptr<torch::nn::Module>>& found) const {
  for (const Statement& s : block) {
    if (s.kind == Kind::Call && s.region.inlined)
      found.push_back(modules_[static_cast<size_t>(s.op)]->root());
    if (s.kind != Kind::Region || s.region.inlined) collect_modules(s.block, found);
  }
}

void Interpreter::record_modules(Stage& stage) {
  for (const auto& each : modules_) {
    StatefulImpl& module = each->module();
    for (const auto& [constant, memory] : module.constants()) {
      const bool is_moved = memory != nullptr && constant.const_data_ptr() != memory;
      stage.entries.push_back(
          {"constant",
           (is_moved ? "moved" : "in place") + (" version " + std::to_string(constant._version())),
           ""});
    }
    for (const auto& buffer : module.named_buffers(/*recurse=*/true)) {
      const auto is_it = [&](const auto& constant) { return constant.first.is_same(*buffer); };
      if (buffer->layout() == at::kStrided && !buffer->is_meta() &&
          std::none_of(module.constants().begin(), module.constants().end(), is_it))
        record_tensor(stage, "buffer " + buffer.key(), *buffer);
    }
  }
}

}  // namespace fuzz
