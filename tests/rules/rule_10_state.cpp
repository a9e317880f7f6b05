// Rule 10: state with a history that a function assigns anew raises where gradients depend on it.

#include <thread>

#include "tests/support/support.h"

namespace {

using Kind = remat::CheckpointError::Kind;
using remat::CheckpointError;

CheckpointError error_of_grad(const Tensor& y, const Tensor& x) {
  return error_of<CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
}

/// Runs `f` on a thread of its own.
template <class F>
void elsewhere(F f) {
  std::thread(f).join();
}

TEST_CASE("state with a history that nothing saves and that the function assigns anew raises",
          "[rule-10]") {
  using Step = std::function<Tensor(Tensor & state, const Tensor& x)>;
  const std::vector<std::pair<const char*, Step>> steps{
      {"computed of the old one",
       [](Tensor& v, const Tensor& x) {
         v = v * 0.5 + x;
         return v.sin();
       }},
      {"in place, but the first time",
       [](Tensor& v, const Tensor& x) {
         v = v.requires_grad() ? v.add_(x) : v + x;
         return (v * 2).sin();
       }},
      {"saved by its reader",
       [](Tensor& v, const Tensor& x) {
         const Tensor y = (v + 1).exp();
         v = x * 2;
         return y + v.sin();
       }},
      {"in a region inside",
       [](Tensor& v, const Tensor& x) {
         return remat::checkpoint(
             {.name = "neuron"},
             [&v](const Tensor& t) {
               v = v * 0.5 + t;
               return v.sin();
             },
             x * 2);
       }},
      {"as an argument of an inner region",
       [](Tensor& v, const Tensor& x) {
         const Tensor y = remat::checkpoint([](const Tensor& t) { return (t * 2).sin(); }, v);
         v = v * 0.5 + x;
         return y * x;
       }},
      {"through a view",
       [](Tensor& v, const Tensor& x) {
         v = v.view(-1) * 0.5 + x;
         return v.sin();
       }},
  };
  const bool early_stop = GENERATE(true, false);
  const bool is_first_read = GENERATE(true, false);
  for (const auto& [what, step] : steps) {
    CAPTURE(what, early_stop, is_first_read);
    const Tensor x = leaf({3});
    Tensor state = at::zeros({3});
    const auto run = [&, &step = step](const Tensor& t) { return step(state, t); };
    const remat::CheckpointOptions options{.name = "neuron", .early_stop = early_stop};
    std::vector<Tensor> results;
    for (int i = 0; i < 3; ++i) results.push_back(remat::checkpoint(options, run, x));
    const Tensor& y = results[is_first_read ? 1 : 2];
    for (int i = 0; i < 2; ++i) {  // of the second recompute the first has assigned it
      const CheckpointError error = error_of_grad(y, x);
      CHECK(error.kind() == Kind::CaptureChanged);
      CHECK(error.region() == "neuron");
    }
    elsewhere([&] {
      for (int i = 0; i < 2; ++i) CHECK(error_of_grad(y, x).kind() == Kind::CaptureChanged);
    });
  }
}

TEST_CASE("an error about state that is assigned anew names the operator that made it",
          "[rule-10][errors]") {
  const Tensor x = leaf({2, 3});
  Tensor state = at::zeros({3});
  // Every reset is outside, and every read finds what this forward made.
  const Tensor y = remat::checkpoint(
      {.name = "neurons"},
      [&](const Tensor& t) {
        Tensor sum = at::zeros({3});
        for (const Tensor& each : t.unbind()) {
          state = state + (each - state) / 2;
          sum = sum + state.sigmoid();
        }
        return sum;
      },
      x);
  const CheckpointError error = error_of_grad(y, x);
  CHECK(error.kind() == Kind::CaptureChanged);
  CHECK(error.mismatches().at(0).position == -1);
  CHECK_THAT(text_of(error), contains("made by AddBackward0 after forward began"));
  CHECK_THAT(text_of(error), contains("the function, or a later call, assigns the variable anew"));
  grad_of(x.sum(), {x});  // LibTorch's queue lets go of the rest of the backward that threw
}

TEST_CASE("state that is an argument and a result has the gradient of plain execution",
          "[rule-10]") {
  const Tensor x = leaf({3, 4});
  const auto step = [](const Tensor& v, const Tensor& t) { return v * 0.5 + t.sin(); };
  const auto run = [&](auto&& call) {
    Tensor v = at::zeros({4});
    for (const Tensor& t : x.unbind()) v = call(v, t).sigmoid();
    return grad_of(v, {x});
  };
  require_bit_equal(
      run([&](const Tensor& v, const Tensor& t) { return remat::checkpoint(step, v, t); }),
      run(step));
}

TEST_CASE("tensors with a history that do no harm raise nothing", "[rule-10]") {
  const Tensor x = leaf({4}), w = leaf({4});
  Tensor outside = w * 2, mean = at::zeros({4}), mask, last;
  elsewhere([&] { outside = outside + 1; });
  const auto f = [&](const Tensor& t) {
    if (!mask.defined()) mask = at::rand({4}) > 0.5;  // made once, without a history
    const Tensor y = (t * outside + outside).sin();   // older than the region
    Tensor scaled;
    elsewhere([&] {  // a history of another thread, in each run
      const at::AutoGradMode grad_mode(true);
      scaled = y * 2;
    });
    mean = mean * 0.9 + y;  // read, but nothing that is saved depends on it
    last = scaled.exp();    // assigned, and read afterwards
    return (last * mask).tanh() * last;
  };
  Calls calls;
  const Tensors plain = grad_of(f(x), {x, w});
  const Tensor y = remat::checkpoint(counted(calls, f), x);
  require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), plain);
  elsewhere([&] { require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), plain); });
  require_bit_equal(grad_of(y, {x, w}), plain);
  CHECK(calls.count() == 4);
  mask = mean = last = Tensor();
}

TEST_CASE("with the capture check off a recompute computes with the state that is there",
          "[rule-10]") {
  const Tensor x = leaf({3});
  Tensor state = at::zeros({3});
  const Tensor y = remat::checkpoint(
      {.capture_check = remat::CaptureCheck::Ignore},
      [&](const Tensor& t) {
        state = state + t;
        return state.sin();
      },
      x);
  CHECK(bit_equal(grad_of(y, {x})[0], (x + x).cos().detach()));
  state = Tensor();
}

}  // namespace
