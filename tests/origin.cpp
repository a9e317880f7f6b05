// The origin of saved tensors: modules, operators, lines; sums by module; the text of a failed
// allocation.

#include "remat/origin.h"

#include <map>
#include <thread>

#include "remat/memory.h"
#include "tests/support/nn.h"

using remat::checkpoint;
using remat::ModuleBytes;
using remat::ModuleScope;
using remat::OriginGuard;
using remat::SavedTensorInfo;

namespace {

Tensor model(const Tensor& x, bool is_region) {
  const ModuleScope root("");
  const auto block = [](const Tensor& t) {
    const ModuleScope scope("layers.0", {"models/net.cpp", 12});
    const Tensor y = t.sin();
    const ModuleScope inner("layers.0.mlp", {"models/net.cpp", 20});
    return y.exp();
  };
  Tensor y = is_region ? checkpoint(block, x) : block(x);
  {
    const ModuleScope scope("layers.1", {"models/net.cpp", 31});
    y = y.cos();
  }
  return y.tanh();
}

/// The infos by node.
std::map<std::string, SavedTensorInfo> by_node(const Tensor& root) {
  std::map<std::string, SavedTensorInfo> all;
  for (const SavedTensorInfo& each : remat::saved_tensors(root)) all.emplace(each.node, each);
  return all;
}

}  // namespace

TEST_CASE("saved tensors show the module, the operator and the line, in regions too", "[origin]") {
  const Tensor x = leaf({8});
  const bool is_region = GENERATE(false, true);
  const OriginGuard guard({.operators = true});
  const Tensor y = model(x, is_region);
  const auto infos = by_node(y);
  const auto check = [&](const char* node, const char* module, const char* op, const char* place) {
    CAPTURE(node);
    const SavedTensorInfo& info = infos.at(node);
    CHECK(info.module == module);
    CHECK(info.op == op);
    CHECK(info.place == place);
  };
  check("SinBackward0", "layers.0", "aten::sin", "net.cpp:12");
  check("ExpBackward0", "layers.0.mlp", "aten::exp", "net.cpp:20");
  check("CosBackward0", "layers.1", "aten::cos", "net.cpp:31");
  CHECK(infos.at("TanhBackward0").module.empty());
  CHECK(infos.at("TanhBackward0").op == "aten::tanh");
  CHECK(infos.at("SinBackward0").dropped == is_region);
  grad_of(y, {x}, {.retain_graph = true});  // a recompute changes no note
  CHECK(by_node(y).at("ExpBackward0").module == "layers.0.mlp");
}

TEST_CASE("a place of the program's own replaces that of the scope", "[origin]") {
  const Tensor x = leaf({8});
  int64_t line = 0;
  const auto place = [&line] { return "train.py:" + std::to_string(++line); };
  const OriginGuard guard({.operators = true, .place = place});
  const ModuleScope scope("head");
  const auto infos = by_node(x.sin().exp());
  CHECK_THAT(infos.at("SinBackward0").place, contains("train.py:"));
  CHECK(infos.at("SinBackward0").place != infos.at("ExpBackward0").place);
}

TEST_CASE("without a guard, after it, and on another thread there are no notes", "[origin]") {
  const Tensor x = leaf({8});
  CHECK(by_node(model(x, true)).at("SinBackward0").module.empty());
  Tensor y;
  {
    const OriginGuard guard;
    y = model(x, true);
    CHECK(by_node(y).at("SinBackward0").module == "layers.0");
    CHECK(by_node(y).at("SinBackward0").op.empty());
    Tensor other;
    std::thread([&] { other = model(x, false); }).join();
    CHECK(by_node(other).at("SinBackward0").module.empty());
  }
  CHECK(by_node(y).at("SinBackward0").module.empty());
}

TEST_CASE("bytes by module, with parameters, gradients and the optimizer's state", "[origin]") {
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Linear(8, 2));
  const Tensor x = leaf({16, 4});
  const OriginGuard guard;
  const auto linear = [&](int64_t number, const Tensor& t) {
    const ModuleScope scope(std::to_string(number));
    return net[static_cast<std::size_t>(number)]->as<torch::nn::Linear>()->forward(t).sin();
  };
  const Tensor h = checkpoint([&](const Tensor& t) { return linear(0, t); }, x);
  const Tensor y = linear(1, h);
  y.sum().backward({}, /*keep_graph=*/true);
  const auto state = [](const Tensor& parameter) { return Tensors{at::zeros_like(parameter)}; };
  std::map<std::string, ModuleBytes> sums;
  for (const ModuleBytes& each : remat::bytes_by_module(remat::saved_tensors(y), *net, state))
    sums.emplace(each.module, each);
  constexpr int64_t first = (4 * 8 + 8) * 4, second = (8 * 2 + 2) * 4;
  CHECK(sums.at("0").parameters_bytes == first);
  CHECK(sums.at("0").gradients_bytes == first);
  CHECK(sums.at("0").optimizer_bytes == first);
  CHECK(sums.at("1").parameters_bytes == second);
  CHECK(sums.at("0").dropped_bytes >= 16 * 8 * 4);  // the product, which the sine saves
  CHECK(sums.at("0").saved_bytes == 0);
  CHECK(sums.at("1").dropped_bytes == 0);
  CHECK(sums.at("1").saved_bytes >= 16 * 2 * 4);
}

TEST_CASE("a failed allocation under a limit lists the bytes of regions, without a recorder",
          "[origin]") {
  const remat::MemoryMeter meter;
  const Tensor x = leaf({1000});
  const remat::MemoryLimitGuard limit(meter.live_bytes() + 1'000'000);
  const Tensor y =
      checkpoint({.name = "block 7"}, [](const Tensor& t) { return t.sin().exp(); }, x * 2);
  const auto error = error_of<c10::OutOfMemoryError>([] { at::empty({1'000'000}); });
  const std::string text = error.what_without_backtrace();
  CAPTURE(text);
  CHECK_THAT(text, contains("block 7 (1 of them): inputs"));
  CHECK_THAT(text, contains("other"));
}
