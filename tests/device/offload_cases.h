#pragma once
// The promises of offloading on any accelerator: the stand-in of stand_in.h, or a real one.

#include <functional>
#include <memory>

#include "tests/support/saved_tensors.h"

namespace offload {

struct Accelerator {
  at::Device device;
  std::function<int64_t()> live_bytes;  ///< of tensors on the device
};

inline int64_t bytes_of(const Tensor& t) { return static_cast<int64_t>(t.nbytes()); }

/// Matrices and biases on the device.
struct Layers {
  Tensors w, b;
  Layers(const Accelerator& on, int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; ++i) {
      w.push_back(at::randn({width, width}).div_(width).to(on.device).requires_grad_());
      b.push_back(at::randn({width}).to(on.device).requires_grad_());
    }
  }
  Tensor run(std::size_t i, const Tensor& x) const { return at::linear(x, w[i], b[i]); }
  Tensors all() const {
    Tensors both = w;
    both.insert(both.end(), b.begin(), b.end());
    return both;
  }
};

inline void require_same(const Tensors& actual, const Tensors& expected) {
  REQUIRE(actual.size() == expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    REQUIRE(actual[i].device() == expected[i].device());
    require_bit_equal({actual[i].cpu()}, {expected[i].cpu()});
  }
}

inline Tensor stand_in_leaf(const Accelerator& on, at::IntArrayRef sizes) {
  return at::randn(sizes).to(on.device).requires_grad_();
}

/// Returns the values after a save and a read under a guard.
inline Tensor through(const Tensor& t, bool pin_memory) {
  torch::autograd::SavedVariable variable;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory});
    variable = torch::autograd::SavedVariable(t, false);
  }
  return variable.unpack();
}

/// Under the guard a graph holds as many device bytes as without grad.
inline void device_bytes_are_those_without_grad(const Accelerator& on, bool pin_memory) {
  const Tensor x = stand_in_leaf(on, {100000});
  const auto f = [](const Tensor& t) { return (t + 1) * (t + 1); };
  const auto held_by = [&](auto&& scope) {
    const int64_t before = on.live_bytes();
    Tensor y;
    {
      [[maybe_unused]] const auto guard = scope();
      y = f(x);
    }
    const int64_t held = on.live_bytes() - before;
    return std::pair(held, y);
  };
  const auto [with_grad, y1] = held_by([] { return 0; });
  const auto [without, y2] = held_by([] { return at::NoGradGuard(); });
  const auto [offloaded, y3] = held_by([&] {
    return std::make_unique<remat::SaveOnCpuGuard>(
        remat::SaveOnCpuOptions{.pin_memory = pin_memory});
  });
  CAPTURE(pin_memory, with_grad, without, offloaded);
  CHECK(offloaded == without);
  CHECK(offloaded < with_grad);
  require_same(grad_of(y3, {x}), grad_of(y1, {x}));
}

/// Tensors of fewer than `min_bytes` stay on the device.
inline void smaller_tensors_stay(const Accelerator& on, bool pin_memory) {
  const Tensor x = stand_in_leaf(on, {1024});
  // Measures the bytes of (x + 1).sin() besides its result: x + 1, which sin saves.
  const auto held = [&](int64_t min_bytes) {
    const int64_t before = on.live_bytes();
    Tensor y;
    {
      const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory, .min_bytes = min_bytes});
      y = (x + 1).sin();
    }
    const int64_t held = on.live_bytes() - before - bytes_of(y);
    require_same(grad_of(y, {x}), {(x + 1).cos().detach()});
    return held;
  };
  CHECK(held(4096) == 0);
  CHECK(held(4097) == 4096);
}

/// The tensors that three layers save leave the device.
inline void what_three_layers_save_leaves_the_device(const Accelerator& on, bool pin_memory) {
  const Layers layers(on, 3, 10);
  const Tensor x = at::randn({4, 10}).to(on.device);
  const auto f = [&] { return layers.run(2, layers.run(1, layers.run(0, x).sin()).sin()); };
  const Tensors plain = grad_of(f(), layers.all());
  const int64_t before = on.live_bytes();
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory});
    y = f();
  }
  // On the device a tensor may take more than its bytes; two tensors would exceed this bound.
  CHECK(on.live_bytes() - before < 2 * 512 + bytes_of(y));
  require_same(grad_of(y, layers.all()), plain);
}

/// A block with an offloaded input holds less on the device after forward.
inline void an_offloaded_block_holds_less(const Accelerator& on) {
  const Layers layers(on, 3, 64);
  const Tensor x = stand_in_leaf(on, {512, 64});
  const auto run = [&](bool offload) {
    const int64_t before = on.live_bytes();
    Tensor h = layers.run(0, x);
    h = remat::checkpoint(
        {.offload_inputs = offload}, [&](const Tensor& t) { return layers.run(1, t).sin(); },
        h + 1);
    h = remat::checkpoint([&](const Tensor& t) { return layers.run(2, t); }, h);
    const int64_t held = on.live_bytes() - before;
    return std::tuple(h.detach(), held, grad_of(h.pow(2), layers.all()));
  };
  const auto [loss, bytes, grads] = run(false);
  const auto [offloaded_loss, offloaded_bytes, offloaded_grads] = run(true);
  require_same({offloaded_loss}, {loss});
  require_same(offloaded_grads, grads);
  CHECK(offloaded_bytes == bytes - 512 * 64 * 4);
}

/// Regions with offloaded inputs and masks give the plain gradients.
inline void offloaded_inputs_give_plain_gradients(const Accelerator& on, int64_t count,
                                                  int64_t width, int64_t rows) {
  const Layers layers(on, static_cast<int64_t>(count), width);
  const Tensor mask = (at::randn({rows, width}) > 0).to(on.device);
  const auto run = [&](int mode) {  // 0: plain, 1: regions, 2: with offloaded inputs
    Tensors found;
    Tensor x = at::full({rows, width}, 0.25).to(on.device);
    for (int step = 0; step < 2; ++step) {
      Tensor h = x.detach() * (step + 1);
      for (std::size_t i = 0; i < layers.w.size(); ++i) {
        const auto block = [&layers, i](const Tensor& t, const Tensor& m) {
          return (layers.run(i, t) * m).relu();
        };
        h = mode == 0 ? block(h, mask)
                      : remat::checkpoint({.offload_inputs = mode == 2}, block, h, mask);
      }
      found.push_back(h.detach());
      for (const Tensor& each : grad_of(h.sin(), layers.all())) found.push_back(each);
    }
    return found;
  };
  const Tensors plain = run(0);
  require_same(run(1), plain);
  require_same(run(2), plain);
  const int64_t before = on.live_bytes();
  {
    const at::NoGradGuard no_grad;
    remat::checkpoint(
        {.offload_inputs = true}, [](const Tensor& t) { return t.sin(); }, mask * 2.f);
  }
  CHECK(on.live_bytes() == before);
}

/// A function whose backward returns a view of the tensor that it unpacked.
struct GivesView : torch::autograd::Function<GivesView> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& s) {
    ctx->save_for_backward({s});
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list) {
    return {ctx->get_saved_variables()[0].view({-1}).view({64, 64}), Tensor()};
  }
};

inline void a_view_of_an_unpacked_tensor_lives(const Accelerator& on, bool pin_memory) {
  const Tensor x = stand_in_leaf(on, {64, 64}), s = at::randn({64, 64}).to(on.device) * 1;
  const auto f = [&] {
    Tensor h = x * 2;
    h = h.sin().cos();
    h = (h * 3).sin();
    return GivesView::apply(h, s * 1);
  };
  const Tensors plain = grad_of(f(), {x});
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory});
    y = f();
  }
  for (int i = 0; i < 8; ++i) at::full({64, 64}, 7.f).to(on.device);  // freed memory is used
  require_same(grad_of(y, {x}), plain);
}

/// A recomputed view of an offloaded input keeps its values.
inline void views_of_restored_inputs_keep_their_values(const Accelerator& on) {
  const Tensor x = at::ones({256, 1024}).to(on.device).requires_grad_();
  Tensor seen;
  const Tensor y = remat::checkpoint(
      {.offload_inputs = true},
      [&](const Tensor& t) {
        const Tensor view = t.view({-1}).view({1024, 256});
        seen = view.detach();
        return view * view.sin();
      },
      x * 1);
  for (int i = 0; i < 4; ++i) at::full({256, 1024}, 5.f).to(on.device);
  const Tensor grad = grad_of(y, {x})[0].cpu();
  CHECK(at::equal(seen.cpu(), at::ones({1024, 256})));
  const Tensor one = at::ones({1024, 256});
  CHECK(at::allclose(grad.view({1024, 256}), one.sin() + one.cos()));
}

/// Views with an offset or strides come back exactly.
inline void views_come_back_exactly(const Accelerator& on, bool pin_memory) {
  const Tensor base = at::randn({12, 16}).to(on.device) + 0;
  for (const Tensor& view :
       {base.slice(0, 3, 9), base.select(0, 5), base.t(), base.slice(1, 1, 16, 2),
        base[0].expand({5, 16}), base.as_strided({4, 5}, {1, 2}, 7)}) {
    const Tensor back = through(view, pin_memory);
    CHECK(back.device() == view.device());
    CHECK(back.strides() == view.strides());
    CHECK(back.storage_offset() == view.storage_offset());
    require_same({back}, {view});
  }
}

/// A second backward on a retained graph reads the offloaded tensors again.
inline void a_second_backward_reads_again(const Accelerator& on, bool pin_memory) {
  const Tensor x = stand_in_leaf(on, {300});
  const auto f = [&] { return ((x + 1).sin() * (x + 2).exp()).sin(); };
  const Tensors plain = grad_of(f(), {x});
  Tensor y;
  {
    const remat::SaveOnCpuGuard guard({.pin_memory = pin_memory});
    y = f();
  }
  const int64_t before = on.live_bytes();
  require_same(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(on.live_bytes() == before);  // copies made ahead are gone
  require_same(grad_of(y, {x}), plain);
}

}  // namespace offload
