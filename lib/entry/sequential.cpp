// Definitions of sequential.h.

#include "remat/sequential.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <cstddef>
#include <string>
#include <utility>

#include "lib/entry/module_function.h"
#include "lib/scope/hook_stack.h"

namespace remat {

namespace {

std::string name_of_stages(std::ptrdiff_t first, std::ptrdiff_t last) {
  if (first == last) return "stage " + std::to_string(first);
  return "stages " + std::to_string(first) + " to " + std::to_string(last);
}

/// Runs the segments of a chain. `modules`: the module of each stage, or empty.
at::Tensor run_segments(const std::vector<Stage>& stages,
                        const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                        int64_t segments, at::Tensor input, const SequentialOptions& options) {
  const auto num_stages = static_cast<int64_t>(stages.size());
  TORCH_CHECK_VALUE(segments >= 1 && segments <= num_stages,
                    "remat::checkpoint_sequential: ", num_stages, " stages cannot be cut into ",
                    segments, " segments. Hint: set 1 to ", num_stages, " segments.");
  for (int64_t i = 0; i < num_stages; ++i)
    TORCH_CHECK_VALUE(stages[static_cast<std::size_t>(i)] != nullptr,
                      "remat::checkpoint_sequential: stage ", i,
                      " (counted from 0) was empty. Hint: pass a function.");

  const int64_t length = num_stages / segments;
  // The first of them are one stage longer; torch leaves the rest to the last segment.
  const int64_t num_longer = options.split == Split::Torch ? 0 : num_stages % segments;
  CheckpointOptions checkpoint_options = options.checkpoint;
  // In-place activations must also work as the first stage of a segment.
  if (checkpoint_options.inputs == InputMode::Default)
    checkpoint_options.inputs = InputMode::CopyOnWrite;
  auto next = stages.begin();
  for (int64_t i = 0; i < segments; ++i) {
    const bool is_last = i == segments - 1;
    const auto end = is_last ? stages.end() : next + length + (i < num_longer ? 1 : 0);
    const auto run = [](const std::vector<Stage>& segment, at::Tensor x) {
      for (const Stage& stage : segment) x = stage(std::move(x));
      return x;
    };
    const auto first = next - stages.begin(), last = end - stages.begin();
    std::vector<Stage> segment(next, end);
    next = end;
    checkpoint_options.name = options.checkpoint.name.empty()
                                  ? name_of_stages(first, last - 1)
                                  : options.checkpoint.name + " " + std::to_string(i);
    if (!modules.empty()) {
      checkpoint_options.modules = options.checkpoint.modules;
      checkpoint_options.modules.insert(checkpoint_options.modules.end(), modules.begin() + first,
                                        modules.begin() + last);
    }
    if (is_last && !options.checkpoint_last) {
      // Recomputes of a region around the chain repeat this segment's writes.
      const auto registered = detail::innermost(detail::Ability::Region) == nullptr
                                  ? nullptr
                                  : register_plain_call(checkpoint_options, nullptr, nullptr);
      return run(segment, std::move(input));
    }
    input = checkpoint(
        checkpoint_options,
        [run, segment = std::move(segment)](at::Tensor x) { return run(segment, std::move(x)); },
        std::move(input));
  }
  return input;
}

}  // namespace

at::Tensor checkpoint_sequential(const std::vector<Stage>& stages, int64_t segments,
                                 at::Tensor input, const SequentialOptions& options) {
  return run_segments(stages, {}, segments, std::move(input), options);
}

at::Tensor checkpoint_sequential(torch::nn::Sequential stages, int64_t segments, at::Tensor input,
                                 const SequentialOptions& options) {
  std::vector<Stage> functions;
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  int64_t position = 0;
  for (torch::nn::AnyModule& module : *stages) {
    functions.emplace_back([module, position](at::Tensor x) mutable -> at::Tensor {
      torch::nn::AnyValue result = module.any_forward(std::move(x));
      const at::Tensor* const tensor = result.try_get<at::Tensor>();
      TORCH_CHECK_VALUE(tensor != nullptr, "remat::checkpoint_sequential: stage ", position,
                        " (counted from 0, ", c10::demangle(module.type_info().name()),
                        ") returned a ", c10::demangle(result.type_info().name()),
                        " instead of a tensor. Hint: wrap it in a module or function that "
                        "returns a tensor.");
      return *tensor;
    });
    modules.push_back(module.ptr());
    ++position;
  }
  return run_segments(functions, modules, segments, std::move(input), options);
}

}  // namespace remat
