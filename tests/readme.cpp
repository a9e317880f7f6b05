// The code blocks of the documents (README.md, docs/, CONTRIBUTING.md) that come from no example;
// readme_test.py compares.

#include <any>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "remat/apply.h"
#include "remat/budget.h"
#include "remat/tiers.h"
#include "tests/support/nn.h"

namespace {

struct Sample {
  at::Tensor values, mask;
};
template <class Visitor>
void visit_tensors(Sample& sample, Visitor&& visit) {
  visit(sample.values);
  visit(sample.mask);
}

/// Writes when it is made and when it ends.
class Range {
 public:
  Range(std::string& log, std::string name) : log_(log), name_(std::move(name)) {
    log_ += "<" + name_;
  }
  ~Range() { log_ += name_ + ">"; }

 private:
  std::string& log_;
  const std::string name_;
};

}  // namespace

TEST_CASE("the page about budgets", "[readme]") {
  torch::nn::Linear model(8, 8);
  const std::vector<Tensor> loader{at::ones({4, 8}), at::zeros({4, 8})};
  const auto train_step = [](torch::nn::Linear& net, const Tensor& batch) {
    net(batch).sin().sum().backward();
  };
  const std::stringstream out;
  const auto before = std::cout.rdbuf(out.rdbuf());
  remat::BudgetGuard budget({.bytes = 2'000'000'000});
  for (const auto& batch : loader) train_step(model, batch);
  std::cout << budget.report().to_string();
  CHECK_THAT(out.str(), contains("budget        2000.00 MB"));
  const auto batch = at::ones({4, 8});
  const auto folder = std::filesystem::temp_directory_path();
  const remat::Recorder recorder;
  train_step(model, batch);
  std::cout << recorder.report().to_string();        // a table by operator
  recorder.write_memory_svg(folder / "budget.svg");  // live bytes with the budget as a line
  recorder.write_html(folder / "budget.html");       // the picture and the table as one page
  std::cout.rdbuf(before);
  for (const char* const name : {"budget.svg", "budget.html"})
    CHECK(std::filesystem::remove(folder / name));
}

TEST_CASE("the README's policies", "[readme]") {
  const Tensor x = leaf({8, 8});
  torch::nn::Linear linear(8, 8);
  const auto block = [&linear](const Tensor& x) {
    return std::get<0>(remat::checkpoint_name(linear(x).sin(), "hidden").mm(x).topk(8)).exp();
  };
  Tensor y = x;
  const remat::Policy large_products = [](const remat::PolicyContext& call) {
    const bool keeps =
        call.op_name == "aten::mm.default" && call.args[0].toTensor().size(0) >= 1024;
    return keeps ? remat::CheckpointPolicy::MustSave : remat::CheckpointPolicy::PreferRecompute;
  };
  y = remat::checkpoint({.policy = remat::save_matmuls()}, block, y);
  y = remat::checkpoint({.policy = remat::save_ops({"aten::addmm", "aten::topk"})}, block, y);
  y = remat::checkpoint({.policy = remat::save_names({"hidden"}) | large_products}, block, y);
  const Tensor grad = grad_of(y, {x})[0];
  CHECK(bit_equal(grad, grad_of(block(block(block(x))), {x})[0]));
}

TEST_CASE("the documents' policies by path, and tables", "[readme]") {
  const remat::Policy by_place = [](const remat::PolicyContext& call) {
    return call.module_path().ends_with(".attention") ? remat::CheckpointPolicy::PreferSave
                                                      : remat::CheckpointPolicy::PreferRecompute;
  };
  using enum remat::CheckpointPolicy;
  const remat::Policy table =
      remat::policy_table({{"layers.*.attention.**: aten::mm|aten::bmm", PreferSave},
                           {"layers.*.mlp: aten::addmm", PreferCpuOffload},
                           {"name=router.*", MustSave},
                           {"*", PreferRecompute}});
  const remat::Policy same = remat::Policy::parse(
      "layers.*.attention.**: aten::mm|aten::bmm = save; layers.*.mlp: aten::addmm = offload;"
      "name=router.* = must_save; * = recompute");
  const Tensor x = leaf({4, 4});
  const auto block = [](const Tensor& t) { return t.mm(t).sin().mm(t); };
  for (const remat::Policy& policy : {by_place, table, same})
    CHECK(bit_equal(grad_of(remat::checkpoint({.policy = policy}, block, x), {x})[0],
                    grad_of(block(x), {x})[0]));
}

TEST_CASE("README: modules and chains run as regions", "[readme]") {
  const at::Tensor x = leaf({2, 8});
  const Counted done;
  remat::Checkpointed<torch::nn::LinearImpl> layer(remat::ModuleOptions{.level = 1}, 8, 8);
  torch::nn::Sequential net(layer, torch::nn::Tanh(), torch::nn::Linear(8, 8));
  const at::Tensor y = net->forward(x);   // the first layer is a region
  remat::set_checkpointing(*net, false);  // all plain
  remat::set_checkpoint_level(*net, 2);   // regions: those of level 1 and 2
  const at::Tensor z = remat::checkpoint_sequential(net, 2, x, {.split = remat::Split::Balanced});
  CHECK(done.now().frames_created == 3);
  CHECK(bit_equal(y, z));
}

namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl() { register_module("linear", linear); }
  at::Tensor forward(const at::Tensor& x) { return linear(x).sin(); }
  torch::nn::Linear linear{4, 4};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("layer1", layer1);
    register_module("layer2", layer2);
    register_module("tail", tail);
  }
  at::Tensor forward(const at::Tensor& x) { return tail(layer2->forward(layer1->forward(x))); }
  torch::nn::Sequential layer1{Block(), Block()}, layer2{Block(), Block()};
  Block tail;
};
TORCH_MODULE(Net);

}  // namespace

TEST_CASE("docs: regions of a model that somebody else wrote", "[readme]") {
  Net net;
  const std::ostringstream printed;
  std::streambuf* const before = std::cout.rdbuf(printed.rdbuf());
  auto applied = remat::apply_checkpointing(*net, {.name = "layer1.*"});  // by path
  applied = remat::apply_checkpointing(*net, {.type = "Block", .every = 2});
  applied = remat::apply_checkpointing(*net, remat::choose<Block>({.name = "layer*.*"}));
  applied = remat::apply_checkpointing(*net, remat::ModuleChoice::parse("every=2,name=layer*.*"));
  applied = remat::apply_checkpointing(*net, {.type = "Block"}, {.training_only = false});
  std::cout << applied.to_string();  // what are regions now; what cannot be, why, and what to write
  remat::require_checkpointing(*net, {.name = "layer1.*"});  // throws if one of them cannot be
  remat::remove_checkpointing(*net, {.name = "layer1.1"});
  remat::remove_checkpointing(*net);
  const Counted done;
  net(leaf({2, 4}));
  CHECK(done.now().frames_created == 0);
  remat::require_checkpointing(*net, {.name = "layer1.*"});
  net(leaf({2, 4}));
  CHECK(done.now().frames_created == 2);
  remat::reset_unused_regions(*net);
  const at::Tensor loss = net->layer1->ptr(0)->as<Block>()->forward(leaf({2, 4})).sum();
  for (const remat::UnusedRegion& unused : remat::unused_regions(*net, loss))
    std::cout << unused.reason << ". Hint: " << unused.cure << ".\n";
  std::cout.rdbuf(before);
  CHECK_THAT(printed.str(), contains("region: layer2.1 (BlockImpl)\nno region: tail (BlockImpl)") &&
                                contains("layer1.0 (BlockImpl) was switched on as an element"));
}

TEST_CASE("README: a recorder and a list of what is saved", "[readme]") {
  const at::Tensor x = leaf({3});
  const auto block = [](const at::Tensor& t) { return t.sin().exp(); };
  const auto folder = std::filesystem::temp_directory_path();
  std::ostringstream text;
  std::streambuf* const before = std::cout.rdbuf(text.rdbuf());
  const remat::Recorder recorder;
  remat::checkpoint({.name = "block 1"}, block, x).sum().backward();
  std::cout << recorder.report().to_string();  // a table: calls, recomputes, bytes, times by region
  recorder.write_html(folder / "step.html");   // live bytes over time, regions, the table
  for (const auto& saved : remat::saved_tensors(block(x)))  // what a graph holds, before backward
    std::cout << saved.node << ' ' << saved.bytes << (saved.dropped ? " dropped\n" : "\n");
  std::cout.rdbuf(before);
  std::filesystem::remove(folder / "step.html");
  CHECK_THAT(text.str(), contains("block 1"));
  CHECK_THAT(text.str(), contains("ExpBackward0 12\nSinBackward0 12\n"));
}

TEST_CASE("README: every form of the call gives the same result", "[readme]") {
  torch::nn::Linear linear(4, 4);
  const at::Tensor x = leaf({2, 4});
  const auto f = [&](const at::Tensor& t) { return linear->forward(t); };
  const at::Tensor a = remat::checkpoint(f, x);       // anything that std::invoke can call
  const at::Tensor b = remat::checkpoint(linear, x);  // a module: its holder or shared_ptr
  const at::Tensor c = remat::checkpoint({.name = "block 3", .early_stop = false}, linear, x);
  const auto block = remat::checkpointed(linear, {.name = "block 3"});  // each call is a region
  const at::Tensor d = block(x);
  for (const at::Tensor& result : {a, b, c, d}) {
    CHECK(bit_equal(result, f(x)));
    CHECK(bit_equal(grad_of(result, {x})[0], grad_of(f(x), {x})[0]));
  }
}

TEST_CASE("README: a user struct takes part through visit_tensors", "[readme]") {
  const Sample sample{leaf({8}), at::ones({8})};
  const auto masked = [](const Sample& s) { return (s.values * s.mask).sin(); };
  const auto nested = [&](const Sample& s) { return remat::checkpoint(masked, s).sum(); };
  const LiveBytes bytes;
  const at::Tensor y = remat::checkpoint(nested, sample);
  CHECK(bytes.held() == 4);
  CHECK(
      bit_equal(grad_of(y, {sample.values})[0], grad_of(masked(sample).sum(), {sample.values})[0]));
}

TEST_CASE("README: a guard beats the option of the regions in its scope", "[readme]") {
  Calls tail;
  const at::Tensor x = leaf({4});
  const auto f = [&tail](const at::Tensor& t) {
    const at::Tensor y = t.sin().sin();
    tail();
    return at::cat({y, at::zeros({10'000})});
  };
  const auto run = [&] {
    const remat::EarlyStopGuard guard(false);  // for the regions opened in its scope
    return remat::checkpoint(f, x);
  };
  run().sum().backward();
  CHECK(tail.count() == 2);
}

TEST_CASE("README: code that shall run once asks is_recomputing", "[readme]") {
  int64_t num_batches = 0;
  const at::Tensor x = leaf({4});
  const auto counting = [&](const at::Tensor& t) {
    if (!remat::is_recomputing()) ++num_batches;  // once per forward
    return t.sin().sin();
  };
  remat::checkpoint(counting, x).sum().backward();
  CHECK(num_batches == 1);
}

TEST_CASE("README: each pass enters its scope once", "[readme]") {
  std::string log;
  const at::Tensor x = leaf({4});
  const auto f = [](const at::Tensor& t) { return t.sin().sin(); };
  const auto ranges = [&log] {
    return remat::ContextPair{
        .forward = [&log] { return std::make_shared<Range>(log, "forward"); },
        .recompute = [&log] { return std::make_shared<Range>(log, "recompute"); }};
  };
  remat::checkpoint({.context_fn = ranges}, f, x).sum().backward();
  CHECK(log == "<forwardforward><recomputerecompute>");
}

TEST_CASE("README: saved tensors can wait in half precision", "[readme]") {
  const at::Tensor x = leaf({1000});
  const at::Tensor y = [&] {
    using Packed = std::pair<at::Tensor, at::ScalarType>;
    const remat::SavedTensorHooksGuard half(
        [](const at::Tensor& t) {
          const bool is_wide = t.scalar_type() == at::kFloat;
          return Packed(is_wide ? t.to(at::kHalf) : t.detach(), t.scalar_type());
        },
        [](const Packed& packed) { return packed.first.to(packed.second); });
    return x.sin().exp();  // what autograd saves here waits in 16 bits
  }();
  const at::Tensor gradient = grad_of(y, {x})[0];
  CHECK(at::allclose(gradient, grad_of(x.sin().exp(), {x})[0], 1e-2, 1e-2));
}

TEST_CASE("README: saved tensors can wait on disk", "[readme]") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path();
  const auto block = [](const at::Tensor& t) { return t.sin().exp(); };
  const at::Tensor x = leaf({40'000});
  at::Tensor y = x + 1;
  {
    const remat::SaveOnDiskGuard disk({.directory = folder});
    y = remat::checkpoint(block, y);  // the input of the region waits in a file
    y = block(y);                     // what autograd saves here does too
  }
  require_bit_equal(grad_of(y, {x}), grad_of(block(block(x + 1)), {x}));
}

TEST_CASE("README: saved tensors in tiers", "[readme]") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path();
  const auto block = [](const at::Tensor& t) { return t.sin().exp(); };
  const at::Tensor x = leaf({400'000});
  at::Tensor y = x + 1;
  // clang-format off
    std::optional<remat::TierCounters> counters;
    {
      const remat::SaveInTiersGuard tiers({.host_bytes = 8 << 20, .directory = folder});
      counters = tiers.counters();
      for (int i = 0; i < 8; ++i) y = block(y);
    }
    y.sum().backward();
    std::printf("%lld bytes written, %.3f s waited\n",
                static_cast<long long>(counters->now().bytes_to_disk),
                counters->now().seconds_waited);
  // clang-format on
  CHECK(counters->now().bytes_to_disk > 0);
  at::Tensor plain = x + 1;
  for (int i = 0; i < 8; ++i) plain = block(plain);
  require_bit_equal({x.grad()}, grad_of(plain.sum(), {x}));
}

TEST_CASE("README: a meter counts bytes and a limit refuses them", "[readme]") {
  const remat::MemoryMeter meter;  // live_bytes(), peak_bytes(), reset_peak()
  const remat::MemoryLimitGuard limit(meter.live_bytes() + 64'000'000);
  // From here on an allocation beyond 64 MB throws c10::OutOfMemoryError.
  CHECK_THROWS_AS(at::empty({16'000'001}), c10::OutOfMemoryError);
  CHECK_NOTHROW(at::empty({1000}));
}

TEST_CASE("README: a Jacobian with a cache costs one recompute per region", "[readme]") {
  const at::Tensor x = leaf({3});
  const at::Tensor y = remat::checkpoint([](const at::Tensor& t) { return t.sin().exp(); }, x);
  std::vector<at::Tensor> rows;
  const Counted done;
  {
    const remat::RecomputeCacheGuard cache({.max_bytes = 512'000'000});
    for (int64_t i = 0; i < y.numel(); ++i)
      rows.push_back(torch::autograd::grad({y[i]}, {x}, {}, /*retain_graph=*/true)[0]);
  }
  CHECK(done.now().recomputes == 1);
  CHECK(bit_equal(at::stack(rows).sum(0), grad_of(x.sin().exp(), {x})[0]));
}

TEST_CASE("README: a random engine of the standard library is state of the region", "[readme]") {
  const at::Tensor x = leaf({3});
  auto random = std::make_shared<std::mt19937>(5);
  struct Engine : remat::StateProvider {
    explicit Engine(std::shared_ptr<std::mt19937> e) : engine(std::move(e)) {}
    std::any capture() override { return *engine; }
    void restore(const std::any& state) override { *engine = std::any_cast<std::mt19937>(state); }
    std::shared_ptr<std::mt19937> engine;
  };
  const remat::StateProviderGuard keeps_engine(std::make_shared<Engine>(random));
  const auto numbers = std::make_shared<std::vector<std::mt19937::result_type>>();
  const at::Tensor y = remat::checkpoint(
      [=](const at::Tensor& t) {
        numbers->push_back((*random)());
        return t.sin().exp();
      },
      x);
  const std::mt19937 after = *random;
  grad_of(y, {x});
  REQUIRE(numbers->size() == 2);
  CHECK((*numbers)[0] == (*numbers)[1]);
  CHECK(*random == after);
}

TEST_CASE("README: a checkpoint error carries what differs as fields", "[readme]") {
  const at::Tensor x = leaf({4});
  bool is_second = false;
  const auto f = [&](const at::Tensor& t) {
    const at::Tensor y = std::exchange(is_second, true) ? at::cat({t, t}) : t + 1;
    return y.sin().sum();
  };
  const at::Tensor loss = remat::checkpoint({.name = "block 3"}, f, x);
  std::ostringstream log;
  try {
    loss.backward();
  } catch (const remat::CheckpointError& error) {
    log << error.what_without_backtrace();
    for (const auto& mismatch : error.mismatches())
      log << mismatch.position << ": " << mismatch.forward << ", now " << mismatch.recompute;
  }
  CHECK_THAT(log.str(), contains("0: Float[4] on cpu, now Float[8] on cpu"));
  CHECK_THAT(log.str(), contains("In region \"block 3\""));
}

TEST_CASE("README: a plan is found for a byte budget and run", "[readme]") {
  const std::vector<remat::Stage> stages{[](const at::Tensor& x) { return x.sin().exp().sin(); },
                                         [](const at::Tensor& x) { return x.cos().exp().cos(); },
                                         [](const at::Tensor& x) { return x.sin().sum(); }};
  const Tensor sample = leaf({1000}), input = leaf({1000});
  const int64_t budget = 30'000;
  const remat::ChainCost cost = remat::measure(stages, sample);  // seconds and bytes of each stage
  const remat::Frontier frontier = remat::solve(cost);           // the least time for every budget
  const remat::Plan plan = frontier.plan(budget);                // [ck[ck[1] 2] ck[3] 4], say
  const at::Tensor loss = remat::run(plan, stages, input);       // nested checkpoint() calls
  const Tensor gradient = grad_of(loss, {input})[0];
  const Tensor plain = stages[2](stages[1](stages[0](input)));
  CHECK(bit_equal(gradient, grad_of(plain, {input})[0]));
  CHECK(remat::simulate(cost, plan).peak_bytes <= budget);
}

// An example of a test, for docs/testing.md.
TEST_CASE("two outputs of a region cost one recompute", "[checkpoint][rule-7]") {
  Calls calls;
  const auto f = [](const Tensor& t) { return std::pair(t.sin().sin(), t.exp().sin()); };
  const auto plain = [&](const Tensor& t) { return f(t).first + f(t).second; };
  const Tensor x = leaf({4});
  const LiveBytes bytes;
  const auto [a, b] = remat::checkpoint(counted(calls, f), x);
  CHECK(bytes.held() == 2 * 4 * 4);  // the results; nothing from inside
  const Tensor gradient = grad_of(a + b, {x})[0];
  CHECK(calls.count() == 2);  // forward, one recompute
  CHECK(bit_equal(gradient, grad_of(plain(x), {x})[0]));
}
