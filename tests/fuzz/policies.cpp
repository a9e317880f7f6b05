// The policies of a program's regions.

#include <ATen/core/ivalue.h>

#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/run.h"

namespace fuzz {

namespace {

using remat::CheckpointPolicy;
using remat::Policy;
using remat::PolicyContext;

constexpr const char* listed[] = {"aten::mm",
                                  "aten::addmm",
                                  "aten::bmm",
                                  "aten::mul",
                                  "aten::mul.Tensor",
                                  "aten::add",
                                  "aten::sub",
                                  "aten::div",
                                  "aten::sin",
                                  "aten::cos",
                                  "aten::exp",
                                  "aten::tanh",
                                  "aten::sigmoid",
                                  "aten::relu",
                                  "aten::gelu",
                                  "aten::silu",
                                  "aten::clamp",
                                  "aten::pow",
                                  "aten::clone",
                                  "aten::_to_copy",
                                  "aten::bernoulli",
                                  "aten::rand",
                                  "aten::randn_like",
                                  "aten::native_dropout",
                                  "aten::randperm",
                                  "aten::empty_like",
                                  "aten::cat",
                                  "aten::sum",
                                  "aten::mean",
                                  "aten::where",
                                  "aten::gt",
                                  "aten::index_select",
                                  "aten::_softmax",
                                  "aten::topk",
                                  "aten::sort",
                                  "aten::native_layer_norm",
                                  "aten::cumsum",
                                  "aten::gather",
                                  "aten::convolution",
                                  "aten::masked_fill",
                                  "aten::stack",
                                  "aten::embedding",
                                  "aten::native_batch_norm",
                                  "aten::_log_softmax"};

std::vector<std::string> some_operators(Dice& dice) {
  std::vector<std::string> some;
  for (int64_t i = 0, n = 1 + dice.below(8); i < n; ++i)
    some.emplace_back(listed[dice.below(std::size(listed))]);
  return some;
}

std::vector<std::string> some_names(Dice& dice) {
  std::vector<std::string> some;
  for (int i = 0; i < num_names; ++i)
    if (dice.percent(50)) some.push_back("n" + std::to_string(i));
  return some;
}

uint64_t mixed(uint64_t hash, uint64_t more) {
  hash = (hash ^ more) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

uint64_t mixed(uint64_t hash, std::string_view text) {
  for (const char letter : text) hash = mixed(hash, static_cast<unsigned char>(letter));
  return hash;
}

/// Answers without state, so that threads and recomputes get the same answers.
CheckpointPolicy answer(uint64_t salt, const PolicyContext& question) {
  uint64_t hash = mixed(mixed(salt, question.op_name), question.name);
  for (const c10::IValue& argument : question.args)
    if (argument.isTensor() && argument.toTensor().defined())
      hash = mixed(hash, static_cast<uint64_t>(argument.toTensor().numel()));
  return static_cast<CheckpointPolicy>(hash % 6);
}

}  // namespace

int64_t prefetch_depth_of(uint64_t salt) {
  static constexpr int64_t depths[] = {2, 0, 1, std::numeric_limits<int64_t>::max()};
  return depths[salt / 12 % std::size(depths)];
}

remat::Policy policy_of(const PolicySpec& spec) {
  Dice dice(spec.salt);
  const remat::SelectiveOptions options{.allow_cache_entry_mutation = spec.allows_mutation,
                                        .save_through_hooks = spec.through_hooks,
                                        .ask_again = spec.asks_again,
                                        .min_offload_bytes = 0,
                                        .prefetch_depth = prefetch_depth_of(spec.salt),
                                        .keep_last = static_cast<int64_t>(spec.salt / 48 % 4)};
  const auto none = [](const PolicyContext&) { return CheckpointPolicy::PreferRecompute; };
  switch (spec.kind) {
    case PolicySpec::Kind::None:
      return {};
    case PolicySpec::Kind::Everything:
      return Policy([](const PolicyContext&) { return CheckpointPolicy::MustSave; }, options);
    case PolicySpec::Kind::Operators:
      return remat::save_ops(some_operators(dice), options);
    case PolicySpec::Kind::OffloadOperators:
      return remat::offload_ops(some_operators(dice), options);
    case PolicySpec::Kind::Names:
      return remat::save_names(some_names(dice)) | Policy(none, options);
    case PolicySpec::Kind::AllButNames:
      return remat::save_all_but_names(some_names(dice)) | Policy(none, options);
    case PolicySpec::Kind::OffloadNames:
      return remat::offload_names(some_names(dice), {.min_offload_bytes = 0});
    case PolicySpec::Kind::Union:
      return remat::save_ops(some_operators(dice), options) | remat::save_names(some_names(dice));
    default:
      return Policy([salt = spec.salt](const PolicyContext& q) { return answer(salt, q); },
                    options);
  }
}

}  // namespace fuzz
