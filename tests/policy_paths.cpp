// Policies that know which module runs and which parameter an operator reads; tables of policies.

#include <ATen/autocast_mode.h>

#include "remat/apply.h"
#include "remat/paths.h"
#include "tests/support/nn.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::CheckpointPolicy;
using remat::Policy;
using remat::policy_table;
using remat::PolicyContext;

namespace {

struct AttentionImpl : torch::nn::Module {
  AttentionImpl()
      : qkv(register_module("qkv", torch::nn::Linear(8, 24))),
        out(register_module("out", torch::nn::Linear(8, 8))) {}
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(x).chunk(3, -1);
    const Tensor weights = at::softmax(parts[0].mm(parts[1].t()), -1);
    return out(weights.mm(parts[2]));
  }
  torch::nn::Linear qkv, out;
};
TORCH_MODULE(Attention);

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : attention(register_module("attention", Attention())),
        mlp(register_module("mlp", torch::nn::Linear(8, 8))) {}
  Tensor forward(const Tensor& x) { return mlp(attention->forward(x).tanh()).sin() + x; }
  Attention attention;
  torch::nn::Linear mlp;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t depth = 2) {
    for (int64_t i = 0; i < depth; ++i) layers->push_back(Block());
    register_module("layers", layers);
  }
  Tensor forward(Tensor x, const remat::CheckpointOptions& options) {
    for (const auto& each : *layers)
      x = checkpoint(options, std::dynamic_pointer_cast<BlockImpl>(each), x);
    return x;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Net);

/// The questions of one forward: operator, module, parameter.
using Asked = std::vector<std::string>;

Policy noting(Asked& asked) {
  return Policy([&asked](const PolicyContext& call) {
    const std::string op(call.op_name);
    if (op == "aten::mm.default" || op == "aten::addmm.default" || op == "aten::tanh.default")
      asked.push_back(op + " " + call.module_path() + " " + call.parameter_path());
    return CheckpointPolicy::PreferRecompute;
  });
}

/// Requires the gradients of the net without regions, and returns how often forward and both
/// recomputes ran addmm.
int64_t addmms_with(Net& net, const Policy& policy) {
  const Seed seed;
  const Tensor x = leaf({4, 8});
  const auto gradients = [&](const Tensor& y) {
    std::vector<Tensor> of = net->parameters();
    of.push_back(x);
    return grad_of(y, of, {.retain_graph = true});
  };
  Tensor plain = x;
  for (const auto& each : *net->layers)
    plain = std::dynamic_pointer_cast<BlockImpl>(each)->forward(plain);
  const auto expected = gradients(plain);
  const KernelCounter kernels;
  const Tensor y = net->forward(x, {.policy = policy});
  for (int i = 0; i < 2; ++i) {
    const auto found = gradients(y);
    for (std::size_t j = 0; j < found.size(); ++j) CHECK(bit_equal(found[j], expected[j]));
  }
  return kernels.count("addmm");
}

}  // namespace

TEST_CASE("a policy sees the path of the module that runs and of the parameter", "[policy]") {
  Net net(1);
  Asked asked;
  const Tensor x = leaf({4, 8});
  remat::register_tree(*net);
  net->forward(x, {.policy = noting(asked)});
  CHECK(asked == Asked{"aten::addmm.default layers.0.attention.qkv layers.0.attention.qkv.bias",
                       "aten::mm.default layers.0 ", "aten::mm.default layers.0 ",
                       "aten::addmm.default layers.0.attention.out layers.0.attention.out.bias",
                       "aten::tanh.default layers.0 ",
                       "aten::addmm.default layers.0.mlp layers.0.mlp.bias"});
  // Other values, types and devices are the same parameters.
  asked.clear();
  net->to(at::kDouble);
  net->forward(leaf({4, 8}, at::kDouble), {.policy = noting(asked)});
  CHECK(asked.front() == "aten::addmm.default layers.0.attention.qkv layers.0.attention.qkv.bias");
  net->to(at::kFloat);
  // A frozen parameter is one, too.
  asked.clear();
  net->layers[0]->as<BlockImpl>()->mlp->bias.requires_grad_(false);
  net->layers[0]->as<BlockImpl>()->mlp->weight.requires_grad_(false);
  net->forward(x, {.policy = noting(asked)});
  CHECK(asked.back() == "aten::addmm.default layers.0.mlp layers.0.mlp.bias");
}

TEST_CASE("without a registered tree paths begin at the region's module", "[policy]") {
  Block block;
  Asked asked;
  checkpoint({.policy = noting(asked)}, block, leaf({4, 8}));
  REQUIRE(asked.size() == 6);
  CHECK(asked[0] == "aten::addmm.default attention.qkv attention.qkv.bias");
  CHECK(asked[1] == "aten::mm.default  ");
  // Where no module is known there is no path, but no harm either.
  asked.clear();
  checkpoint({.policy = noting(asked)}, [](const Tensor& x) { return x.tanh(); }, leaf({4}));
  CHECK(asked == Asked{"aten::tanh.default  "});
}

TEST_CASE("paths are the same in a region inside when the region around recomputes", "[policy]") {
  Net net(1);
  remat::register_tree(*net);
  Asked asked;
  const Policy policy = noting(asked);
  const auto block = net->layers->ptr<BlockImpl>(0);
  const auto inner = [&](const Tensor& x) {
    return checkpoint({.policy = policy}, [&](const Tensor& u) { return block->mlp(u).tanh(); }, x);
  };
  struct Outer : torch::nn::Module {};
  const Tensor x = leaf({4, 8});
  const Tensor y = checkpoint([&](const Tensor& t) { return inner(t.sin()).cos(); }, x);
  const Asked in_forward = asked;
  y.sum().backward();
  REQUIRE(in_forward.size() == 2);
  CHECK(asked == Asked{in_forward[0], in_forward[1], in_forward[0], in_forward[1]});
}

TEST_CASE("autocast's cast of a parameter has the parameter's path", "[policy]") {
  Net net(1);
  remat::register_tree(*net);
  Asked asked;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  net->forward(leaf({4, 8}), {.policy = noting(asked)});
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  CHECK(asked.back().find("layers.0.mlp layers.0.mlp.") != std::string::npos);
}

TEST_CASE("the first line of a table that matches answers", "[policy]") {
  Net net;
  remat::register_tree(*net);
  using enum CheckpointPolicy;
  // Forward calls addmm six times; two recomputes call what is not kept.
  const auto addmms = [&](const std::vector<remat::PolicyLine>& lines) {
    return addmms_with(net, policy_table(lines));
  };
  CHECK(addmms({{"*", PreferRecompute}}) == 18);
  CHECK(addmms({{"*", MustSave}}) == 6);
  CHECK(addmms({{"layers.*.attention.*: aten::addmm", MustSave}, {"*", PreferRecompute}}) == 10);
  CHECK(addmms({{"layers.0.**", MustSave}}) == 12);
  CHECK(addmms({{"layers.0.**: aten::addmm", PreferRecompute}, {"aten::addmm", MustSave}}) == 12);
  CHECK(addmms({{"layers.*.mlp|layers.1.attention.qkv", PreferSave}}) == 12);
  CHECK(addmms({{"layers.?.attention.out: aten::mm | aten::addmm.default", MustSave}}) == 14);
}

TEST_CASE("a table in text is the same table", "[policy]") {
  Net net;
  remat::register_tree(*net);
  const auto addmms = [&](const char* text) { return addmms_with(net, Policy::parse(text)); };
  CHECK(addmms("layers.*.attention.*: aten::addmm = save; * = recompute") == 10);
  CHECK(addmms("# a configuration\n"
               "layers.0.** = must_save   # the first layer\n"
               "\n"
               "* = prefer_recompute\n") == 12);
}

TEST_CASE("a table chooses names and save_regions by patterns", "[policy]") {
  const Tensor x = leaf({6});
  Calls first, second;
  const auto function = [&](const Tensor& t) {
    const auto squared = [](const Tensor& u) { return u.exp() * u; };
    const Tensor a = remat::save_region("attention.qkv", counted(first, squared), t.sin());
    const Tensor b = remat::save_region("attention.out", counted(second, squared), a.cos());
    return remat::checkpoint_name(b.tan(), "head") * t;
  };
  const Tensor expected = grad_of(function(x), {x})[0];
  const auto counts_of = [&](const char* text) {
    first.reset();
    second.reset();
    const KernelCounter kernels({"tan"});
    const Tensor y = checkpoint({.policy = Policy::parse(text)}, function, x);
    CHECK(bit_equal(grad_of(y, {x})[0], expected));
    return std::tuple(first.count(), second.count(), kernels.count("tan"));
  };
  using Counts = std::tuple<int64_t, int64_t, int64_t>;
  CHECK(counts_of("name=attention.* = save") == Counts(1, 1, 2));
  CHECK(counts_of("name=*.qkv|head = save; * = recompute") == Counts(1, 2, 1));
  CHECK(counts_of("name=attention.out = recompute; * = save") == Counts(1, 2, 1));
  CHECK(counts_of("aten::mm = save") == Counts(1, 1, 2));  // no names: they stand by themselves
}

TEST_CASE("a wrong table is refused with a hint", "[policy]") {
  const auto refuses = [](const char* text, const char* cause) {
    CHECK_THROWS_WITH(Policy::parse(text), contains(cause) && contains("Hint: "));
    CHECK_THROWS_AS(Policy::parse(text), c10::ValueError);
  };
  refuses("", "had no lines");
  refuses("layers.*", "no `= ANSWER`");
  refuses("layers.* = keep", "there is no answer \"keep\"");
  refuses("layers.*: = save", "one side of the colon");
  refuses(": aten::mm = save", "one side of the colon");
  refuses("layers.*| = save", "a pattern is empty");
  refuses("name= = save", "a pattern is empty");
  refuses("aten::mm| = save", "an operator is empty");
  refuses("layers.*: aten::nothing = save", "there is no operator \"aten::nothing\"");
  refuses("layers.*: mm = save", "aten::mm");
  refuses("* = save; aten::mm = save", "matches everything");
  refuses("aten::mm = save; aten::mm = recompute", "an earlier line");
  CHECK_THROWS_AS(policy_table({}), c10::ValueError);
}

TEST_CASE("a table warns once about paths that no module has", "[policy]") {
  Net net;
  remat::register_tree(*net);
  const Tensor x = leaf({4, 8});
  const Policy policy = Policy::parse("layer.*.attention.**: aten::mm = save; layers.** = save");
  const Warnings warnings;
  net->forward(x, {.policy = policy});
  net->forward(x, {.policy = policy});
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("\"layer.*.attention.**: aten::mm\""));
}

TEST_CASE("a policy that is asked after the operator sees its results", "[policy]") {
  Net net;
  std::vector<int64_t> sizes;
  const auto large = [&](const PolicyContext& call) {
    if (call.op_name == "aten::addmm.default") {
      REQUIRE(call.results.size() == 1);
      sizes.push_back(call.results[0].toTensor().numel());
      CHECK(call.args[1].toTensor().defined());
    }
    const bool keeps = !call.results.empty() && call.results[0].isTensor() &&
                       call.results[0].toTensor().numel() > 32;
    return keeps ? CheckpointPolicy::MustSave : CheckpointPolicy::PreferRecompute;
  };
  CHECK(addmms_with(net, Policy(large, {.ask_after = true})) == 14);
  CHECK(sizes == std::vector<int64_t>{96, 32, 32, 96, 32, 32});
  const auto always = [](const PolicyContext&) { return true; };
  CHECK_THROWS_WITH(Policy(always, {.ask_again = true, .ask_after = true}),
                    contains("ask_after and ask_again"));
  CHECK_THROWS_AS(Policy(always, {.ask_again = true}) | Policy(always, {.ask_after = true}),
                  c10::ValueError);
}

TEST_CASE("a policy asked after keeps and writes as one asked before", "[policy]") {
  const auto function = [](const Tensor& x) {
    const Tensor a = at::linear(x, x.narrow(0, 0, 3).contiguous(), x.narrow(0, 0, 1).sum(1));
    const Tensor b = at::dropout(a.exp(), 0.5, true);
    return (b.sin_() * a).sum(0) + std::get<0>(x.max(1)).sum();
  };
  const auto all = [](const PolicyContext&) { return CheckpointPolicy::PreferSave; };
  require_same_grads(
      function, [&](const Tensor& x) { return checkpoint({.policy = Policy(all)}, function, x); },
      leaf({5, 4}));
  require_same_grads(
      function,
      [&](const Tensor& x) {
        return checkpoint({.policy = Policy(all, {.ask_after = true})}, function, x);
      },
      leaf({5, 4}));
}

TEST_CASE("a choice of modules has a policy", "[policy]") {
  torch::nn::Sequential net(Block{}, Block{});
  const auto choice = remat::ModuleChoice::parse(
      "type=Block,policy=0.attention.qkv: aten::addmm=save; *=recompute");
  const auto applied = remat::apply_checkpointing(*net, choice);
  REQUIRE(applied.regions.size() == 2);
  const Tensor x = leaf({4, 8});
  const KernelCounter kernels;
  net->forward(x).sum().backward();
  CHECK(kernels.count("addmm") == 11);  // six, and all but one again
  CHECK_THROWS_WITH(remat::ModuleChoice::parse("type=Block,policy=aten::mm"),
                    contains("no `= ANSWER`"));
  remat::ModuleOptions options;
  options.checkpoint.policy = remat::save_matmuls();
  CHECK_THROWS_WITH(remat::apply_checkpointing(*net, choice, options),
                    contains("the choice had a policy"));
}
