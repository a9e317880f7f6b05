// Rule 16: LibTorch's hook switch, tracing, transforms, anomaly mode and other engines beside
// regions.

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>

#include "tests/support/sizes.h"
#include "tests/support/support.h"
#include "tests/support/warnings.h"

namespace {

using at::SavedTensorDefaultHooks;
using torch::autograd::Engine;

// ---- switches ----------------------------------------------------------------------------------

TEST_CASE("where LibTorch's own switch has hooks disabled a region is refused before it runs",
          "[rule-16]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return t.sin(); });
  const int64_t frames = remat::counters().frames_alive;
  SavedTensorDefaultHooks::disable("no hooks in this place");
  CHECK_THROWS_WITH(remat::checkpoint(f, x), contains("no hooks in this place"));
  CHECK_FALSE(SavedTensorDefaultHooks::is_enabled());
  SavedTensorDefaultHooks::enable();
  CHECK(calls.count() == 0);
  CHECK(remat::counters().frames_alive == frames);
  require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), {x.cos()});
  CHECK(calls.count() == 2);
}

TEST_CASE("a disable guard inside a region throws its message and changes nothing", "[rule-16]") {
  const Tensor x = leaf({3});
  Calls refusals;
  Counted done;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        const Tensor h = t.sin();
        try {
          const remat::DisableSavedTensorHooksGuard guard("none in here");
          h.exp();
        } catch (const c10::Error& error) {
          if (text_of(error).find("none in here") != std::string::npos) refusals();
        }
        return h.exp().cos();
      },
      x);
  CHECK(done.now().tensors_dropped == 3);
  CHECK(SavedTensorDefaultHooks::is_enabled());
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().cos(), {x}));
  CHECK(refusals.count() == 2);
  CHECK(SavedTensorDefaultHooks::is_enabled());
}

/// LibTorch before 2.8 lets nobody switch off what is there, but by the state itself.
template <class Hooks>
void switch_off(const std::string& message) {
  if constexpr (requires { Hooks::disable(message, /*fail_if_non_empty=*/false); }) {
    Hooks::disable(message, /*fail_if_non_empty=*/false);
  } else {
    auto state = Hooks::get_tls_state();
    state.disabled_error_message = message;
    Hooks::set_tls_state(state);
  }
}

TEST_CASE("what is saved while a function has LibTorch's switch off stays plain in both passes",
          "[rule-16]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({large});
  Calls refusals;
  auto f = [&](const Tensor& t) {
    Tensor h = t.sin();
    switch_off<SavedTensorDefaultHooks>("switched off");
    h = h.exp();
    try {
      remat::checkpoint([](const Tensor& u) { return u.sin(); }, h);
    } catch (const c10::Error&) {
      refusals();
    }
    SavedTensorDefaultHooks::enable();
    return h.cos();
  };
  LiveBytes bytes;
  Counted done;
  const Tensor y = remat::checkpoint({.early_stop = early_stop}, f, x);
  CHECK(done.now().tensors_dropped == 2);
  CHECK(bytes.held() == 2 * large * 4);  // the result of exp, and the region's
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().cos(), {x}));
  CHECK(refusals.count() == 2);
  CHECK(done.now().tensors_recomputed == 2);
  CHECK(bytes.held() == large * 4);
}

TEST_CASE("while LibTorch traces, tensors are saved plainly and recomputes still work",
          "[rule-16]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return t.sin().exp(); });
  const Tensors plain = grad_of(x.sin().exp(), {x});
  const Tensor made_before = remat::checkpoint(f, x);
  Counted done;
  struct Tracing {
    const bool before = SavedTensorDefaultHooks::set_tracing(true);
    ~Tracing() { SavedTensorDefaultHooks::set_tracing(before); }
  };
  std::optional<Tracing> tracing(std::in_place);
  const Tensor made_inside = remat::checkpoint(f, x);
  CHECK(done.now().tensors_dropped == 0);
  require_bit_equal(grad_of(made_before, {x}), plain);
  CHECK(calls.count() == 3);
  tracing.reset();
  require_bit_equal(grad_of(made_inside, {x}), plain);
  CHECK(calls.count() == 3);
}

TEST_CASE("a region inside a functional transform runs plainly, or is refused", "[rule-16]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return t.sin(); });
  {
    const c10::impl::IncludeDispatchKeyGuard inside(
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    const auto error = error_of<remat::CheckpointError>(
        [&] { remat::checkpoint({.transforms = remat::Transforms::Refuse}, f, x); });
    CHECK(error.kind() == remat::CheckpointError::Kind::Unsupported);
    CHECK_THAT(text_of(error), contains("functorch transform"));
    CHECK(calls.count() == 0);
    Counted done;
    for (int i = 0; i < 2; ++i) {
      const Warnings warnings;
      // No operator runs, since no transform is there.
      remat::checkpoint(counted(calls, [](const Tensor& t) { return t; }), x);
      REQUIRE(warnings.texts.size() <= 1);
      for (const std::string& each : warnings.texts)
        CHECK_THAT(each, contains("runs plainly: autograd keeps every tensor that it saves"));
    }
    CHECK(done.now().frames_created == 0);
  }
  CHECK(calls.count() == 2);
  require_bit_equal(grad_of(remat::checkpoint(f, x), {x}), {x.cos()});
}

// ---- observers, anomaly mode, engines ----------------------------------------------------------

TEST_CASE("an observer of operators sees both passes of a region", "[rule-16]") {
  const Tensor x = leaf({3});
  OpCounter ops;
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().exp().tanh(); }, x);
  const std::vector<std::string> forward{"aten::sin", "aten::exp", "aten::tanh"};
  CHECK(ops.names() == forward);
  grad_of(y, {x});
  for (const std::string& op : forward) CHECK(ops.count(op) == 2);
}

TEST_CASE("a region below autograd saves nothing and keeps nothing", "[rule-16]") {
  const Tensor x = leaf({3});
  Counted done;
  Tensor y;
  {
    const at::AutoDispatchBelowAutograd below;
    y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
  }
  CHECK_FALSE(y.requires_grad());
  CHECK(done.now().tensors_dropped == 0);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("anomaly mode names the node of a region that returned nan", "[rule-16][rule-12]") {
  struct Quiet : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  const c10::WarningUtils::WarningHandlerGuard silence(&quiet);
  const torch::autograd::DetectAnomalyGuard anomaly;
  auto f = [](const Tensor& t) { return (t.sin() * 0).sqrt(); };
  const Tensor x = leaf({3});
  const Tensor plain = f(x);
  // LibTorch 2.9 throws a std::runtime_error, later ones a c10::Error.
  const auto text_of_nan = [&](const Tensor& y) -> std::string {
    try {
      grad_of(y, {x}, {.retain_graph = true});
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
    return {};
  };
  const std::string expected = text_of_nan(plain);
  CHECK_THAT(expected, contains("MulBackward1' returned nan values"));
  const Tensor y = remat::checkpoint(f, x);
  CHECK(text_of_nan(y) == expected);
  CHECK(remat::counters().recomputed_bytes_alive == 0);

  const Tensor harmless = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
  require_bit_equal(grad_of(harmless, {x}), grad_of(x.sin().exp(), {x}));
}

// An engine that another library installs, as Python's torch does: it knows nothing of ours.
class OtherEngine final : public Engine {
 public:
  explicit OtherEngine(Engine& below) : below_(below) {}
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    backwards();
    return below_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  Calls backwards;

 private:
  Engine& below_;
};
OtherEngine* other_engine = nullptr;

TEST_CASE("regions work on when another engine is installed over ours", "[rule-16]") {
  const Tensor x = leaf({3});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) {
    return remat::checkpoint([](const Tensor& u) { return u.sin().exp(); }, t.cos()).cos();
  });
  const Tensors plain = grad_of(x.cos().sin().exp().cos(), {x});
  const Tensor made_before = remat::checkpoint(f, x);

  // It stays for the rest of the process, like Python's; it forwards to the one it found.
  if (other_engine == nullptr) {
    other_engine = new OtherEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub(+[]() -> Engine& { return *other_engine; });
  }
  const int64_t backwards = other_engine->backwards.count();
  Counted done;
  require_bit_equal(grad_of(made_before, {x}), plain);
  CHECK(done.now().recomputes == 2);
  CHECK(done.now().tensors_recomputed == 5);
  CHECK(other_engine->backwards.count() == backwards + 1);

  calls.reset();
  Counted done_after;
  const Tensor made_after = remat::checkpoint(f, x);
  CHECK(done_after.now().tensors_dropped == 5);
  require_bit_equal(grad_of(made_after, {x}), plain);
  CHECK(calls.count() == 2);
  CHECK(other_engine->backwards.count() == backwards + 2);
}

}  // namespace
