// Guards of hooks.h that keep saved tensors elsewhere, on the CPU: which tensors move, and which
// bits come back.

#include <sys/mman.h>
#include <torch/version.h>

#include <limits>
#include <optional>
#include <thread>

#include "remat/report.h"
#include "remat/tiers.h"
#include "tests/support/child_process.h"
#include "tests/support/each_guard.h"
#include "tests/support/files.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/sizes.h"

using remat::checkpoint;
using remat::SaveAsGuard;
using remat::SavedTensorHooksGuard;
using remat::SaveOnCpuGuard;
using remat::SaveOnDiskGuard;
using torch::autograd::SavedVariable;

namespace {

template <class T>
bool same_layout(const T& a, const T& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset() && a.dtype() == b.dtype() &&
         a.device() == b.device() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
         a.requires_grad() == b.requires_grad();
}

}  // namespace

// ---- on the CPU ------------------------------------------------------------------------------

TEST_CASE("tensors on the CPU pass SaveOnCpuGuard uncopied", "[hooks][offload]") {
  const bool pin_memory = GENERATE(false, true);
  const auto f = [](const Tensor& x) {
    return checkpoint([](const Tensor& t) { return t.sin().pow(2); }, x).sin().pow(2);
  };
  require_same_grads([](const Tensor& x) { return x.sin().pow(2).sin().pow(2); },
                     [&](const Tensor& x) {
                       const SaveOnCpuGuard guard({.pin_memory = pin_memory});
                       return f(x);
                     },
                     leaf({4, 4}));
  const Tensor x = leaf({64});
  const LiveBytes bytes;
  const auto held_by = [&](bool guarded) {
    std::optional<SaveOnCpuGuard> guard;
    if (guarded) guard.emplace(remat::SaveOnCpuOptions{.pin_memory = pin_memory});
    const Tensor y = x.exp().sin();
    return bytes.held();
  };
  const int64_t plain = held_by(false);
  CHECK(held_by(true) == plain);
}

TEST_CASE("tensors of min_bytes are moved, and smaller ones stay", "[hooks][offload]") {
  const Folder folder;
  // (x + 1).sin() holds, beside its result, x + 1, which sin saves.
  const auto held = [](int64_t num_bytes, auto make_guard) {
    const Tensor x = leaf({num_bytes / 4});
    const LiveBytes bytes;
    Tensor y;
    {
      [[maybe_unused]] const auto guard = make_guard();
      y = (x + 1).sin();
    }
    return bytes.held() - num_bytes;
  };
  const auto on_disk = [&](int64_t num_bytes, std::optional<int64_t> min_bytes) {
    return held(num_bytes, [&] {
      remat::SaveOnDiskOptions options{.directory = folder.path()};
      if (min_bytes) options.min_bytes = *min_bytes;
      return std::make_unique<SaveOnDiskGuard>(options);
    });
  };
  CHECK(on_disk(4096, 4096) == 0);
  CHECK(on_disk(4096, 4097) == 4096);
  CHECK(on_disk(65536, std::nullopt) == 0);
  CHECK(on_disk(65532, std::nullopt) == 65532);
  const auto narrower = [&](int64_t min_bytes) {
    return held(4096, [&] { return std::make_unique<SaveAsGuard>(at::kBFloat16, min_bytes); });
  };
  CHECK(narrower(4096) == 2048);
  CHECK(narrower(4097) == 4096);
}

TEST_CASE("nested offload guards: the innermost packs, and the outer one is back after it",
          "[hooks][offload]") {
  const Tensor x = leaf({8});
  Calls outer, inner;
  const auto counting = [](Calls& calls) {
    return std::make_unique<SavedTensorHooksGuard>(
        counted(calls, [](const Tensor& t) { return t; }), [](const Tensor& t) { return t; });
  };
  const auto around = counting(outer);
  const bool throws = GENERATE(false, true);
  try {
    const SaveOnCpuGuard guard;
    const Tensor y = x.exp();
    CHECK(outer.count() == 0);
    {
      const auto innermost = counting(inner);
      const Tensor z = x.exp();
      CHECK(inner.count() == 1);
    }
    const SaveOnCpuGuard second;
    if (throws) throw std::runtime_error("out");
  } catch (const std::runtime_error&) {
  }
  CHECK(outer.count() == 0);
  const Tensor y = x.exp();
  CHECK(outer.count() == 1);
  CHECK(inner.count() == 1);
  require_bit_equal(grad_of(y, {x}), {y.detach()});
}

TEST_CASE("float, double and sparse leaves come back under each guard as they were",
          "[hooks][offload]") {
  using Mul = nodes::MulBackward0;
  with_each_guard([](auto make) {
    for (const auto dtype : {at::kFloat, at::kDouble})
      for (const bool sparse : {false, true}) {
        Tensor a = at::randn({3, 3}, dtype);
        if (sparse) a = a.to_sparse();
        a.requires_grad_();
        const auto guard = make();
        const Tensor y = a * a;
        for (const auto member : {&Mul::self_, &Mul::other_}) {
          const Tensor saved = read_saved(y, member);
          CHECK(saved.layout() == a.layout());
          CHECK(saved.dtype() == a.dtype());
          CHECK(bit_equal(saved, a));
        }
        if (sparse)
          y.backward(at::ones({3, 3}, dtype).to_sparse());
        else
          y.sum().backward();
        CHECK(at::equal(a.grad().to_dense(), 2 * a.detach().to_dense()));
      }
  });
}

// ---- what comes back -------------------------------------------------------------------------

TEST_CASE("whatever is saved comes back with dtype, sizes, strides, offset and bits",
          "[hooks][offload]") {
  const Tensor base = at::randn({6, 8});
  const Tensor complex = at::randn({4, 4}, at::kComplexFloat);
  const Tensors all{
      base,
      base.t(),
      base.slice(0, 2, 5),
      base.slice(1, 1, 8, 2),
      base.select(1, 3),
      base[2][3],
      base.expand({3, 6, 8}),
      base[0].expand({5, 8}),
      base.as_strided({5, 4}, {1, 2}, 3),
      base.view(at::kInt),
      at::scalar_tensor(2.5),
      at::empty({0, 3}),
      at::randint(9, {7}),
      at::randn({5}) > 0,
      at::randn({4, 4}, at::kHalf),
      at::randn({4, 4}).to(at::kBFloat16),
      complex,
      complex.conj(),
      at::imag(complex.conj()),
      at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
      at::randn({400, 400})[7],
      at::randn({400, 400}).select(1, 7),
      at::randn({4, 4}).to_sparse(),
      at::randn({4, 4}).to_sparse_csr(),
      at::quantize_per_tensor(at::randn({4}), 0.1, 0, at::kQInt8),
      at::empty({3}, at::TensorOptions().device(at::kMeta)),
  };
  with_each_guard([&](auto make) {
    for (const Tensor& t : all) {
      CAPTURE(t.toString(), t.sizes());
      for (const bool requires_grad : {false, true}) {
        Tensor saved = t;
        if (requires_grad) {
          if (!t.is_floating_point() && !t.is_complex()) continue;
          if (t.is_quantized()) continue;
          saved = t.detach().requires_grad_();
          if (t.is_meta() || t.layout() != at::kStrided) continue;
          saved = saved.view_as(saved);  // no leaf, but a view of one: it stays
        }
        auto guard = make();
        const SavedVariable variable(saved, /*is_output=*/false);
        if (GENERATE_COPY(false, true)) guard.reset();
        const Tensor back = variable.unpack();
        CHECK(back.layout() == t.layout());
        if (t.is_meta()) continue;
        if (t.layout() == at::kStrided) {
          if (t.storage().nbytes() <= 65536 || back.storage_offset() != 0)
            CHECK(same_layout(back, saved));
          else
            CHECK((back.strides() == t.strides() && back.sizes() == t.sizes()));
        }
        if (t.is_quantized())
          CHECK(at::equal(back.int_repr(), t.int_repr()));
        else if (t.layout() == at::kSparseCsr)
          CHECK(at::equal(back.to_dense(), t.to_dense()));
        else
          CHECK(bit_equal(back, t));
      }
    }
    const auto guard = make();
    CHECK_FALSE(SavedVariable(Tensor(), false).unpack().defined());
  });
}

TEST_CASE("parameters and views of leaves stay where they are", "[hooks][offload]") {
  const Tensor p = leaf({256, 256});
  with_each_guard([&](auto make) {
    for (const Tensor& t : {p, p.t(), p.view({-1}), p[3]}) {
      Tensor back;
      {
        const auto guard = make();
        const SavedVariable variable(t, false);
        const Tensor next = leaf({2}).exp();
        back = variable.unpack();
      }
      CHECK(back.data_ptr() == t.data_ptr());
      CHECK(back.requires_grad() == t.requires_grad());
    }
  });
  // A region's input is an alias without history; it is judged by the tensor it stands for.
  const Folder folder;
  const LiveBytes bytes;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    const Tensor y = checkpoint([](const Tensor& w) { return w.sin(); }, p);
    CHECK(folder.status().st_size == 0);
    require_bit_equal(grad_of(y, {p}), {p.detach().cos()});
  }
  CHECK(bytes.held() == 0);
}

TEST_CASE("a guard counts what it moves and brings back, also when it is gone", "[hooks]") {
  const Folder folder;
  const Tensor x = leaf({1000});
  std::optional<remat::MoveCounters> counters;
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    counters = guard.counters();
    CHECK(counters->now().moves == 0);
    y = (x + 1).sin().exp();  // saves x + 1 and the result
  }
  const remat::MoveCounts moved = counters->now();
  CHECK(moved.moves == 2);
  CHECK(moved.bytes_moved == 2 * 4000);
  CHECK(moved.loads == 0);
  for (int64_t i = 1; i <= 2; ++i) {
    grad_of(y, {x}, {.retain_graph = true});
    const remat::MoveCounts read = counters->now();
    CHECK(read.moves == 2);
    CHECK(read.loads == 2 * i);
    CHECK(read.loads_ahead == i);  // all but the one that backward reads first
    CHECK(read.bytes_loaded == 2 * i * 4000);
    CHECK(read.seconds_waited > 0);
  }
}

TEST_CASE("a guard reads as many saved tensors ahead from the file as it is told", "[hooks]") {
  const Folder folder;
  constexpr int64_t size = 4000;
  const Tensor x = leaf({size / 4});
  const auto sines = [](Tensor t, int count) {
    for (int i = 0; i < count; ++i) t = t.sin();
    return t;
  };
  const Tensor plain = grad_of(sines(x + 1, 6), {x})[0];
  const int64_t depth =
      GENERATE(int64_t{0}, int64_t{1}, int64_t{2}, std::numeric_limits<int64_t>::max());
  CAPTURE(depth);
  std::optional<remat::MoveCounters> counters;
  Tensor middle, y;
  {
    const SaveOnDiskGuard guard(
        {.directory = folder.path(), .min_bytes = 0, .prefetch_depth = depth});
    counters = guard.counters();
    middle = sines(x + 1, 5);
    y = middle.sin();
  }
  const int64_t num_read = 1 + std::min<int64_t>(depth, 5);
  const remat::Recorder recorder;
  const auto bytes_read = [&] { return recorder.report().files.bytes_read; };
  int64_t when_one_was_asked_for = 0;
  const unsigned hook = middle.register_hook([&](const Tensor&) {
    for (int i = 0; i < 5000 && bytes_read() < num_read * size; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    when_one_was_asked_for = bytes_read();
  });
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), {plain});
  CHECK(when_one_was_asked_for == num_read * size);
  CHECK(counters->now().loads == 6);
  CHECK(counters->now().loads_ahead == (depth == 0 ? 0 : 5));
  middle.remove_hook(hook);
  require_bit_equal(grad_of(y, {x}), {plain});
}

TEST_CASE("a tensor and its views are stored once", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({64, 96}), w = leaf({96, 96});
  const SaveOnDiskGuard guard(all_in(folder));
  const Tensor hidden = x.mm(w);  // saves leaves
  REQUIRE(folder.status().st_size == 0);
  const Tensors parts = hidden.chunk(3, 1);
  const Tensor y = (parts[0] * parts[1]).sum() + (parts[2] * parts[2]).sum() +
                   hidden.t().mm(hidden).sum() + hidden.view({-1}).dot(hidden.view({-1}));
  CHECK(folder.status().st_size == bytes_of(hidden));
  const auto f = [&](const Tensor& h) {
    const Tensors p = h.chunk(3, 1);
    return (p[0] * p[1]).sum() + (p[2] * p[2]).sum() + h.t().mm(h).sum() +
           h.view({-1}).dot(h.view({-1}));
  };
  const Tensors grads = grad_of(y, {x, w});
  Tensors plain;
  {
    const SavedTensorHooksGuard none([](const Tensor& t) { return t; },
                                     [](const Tensor& t) { return t; });
    plain = grad_of(f(x.mm(w)), {x, w});
  }
  require_bit_equal(grads, plain);
}

TEST_CASE("equal versions of one storage with other contents are not mixed up",
          "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({32});
  const bool through_data = GENERATE(true, false);
  const SaveOnDiskGuard guard(all_in(folder));
  const Tensor scale = at::ones({32});
  const Tensor first = x * scale;
  const Tensor next = x.exp();  // now `scale` is copied
  if (through_data)
    scale.data().fill_(3);
  else
    std::fill_n(scale.mutable_data_ptr<float>(), 32, 3.f);
  const Tensor second = x * scale;
  require_bit_equal(grad_of(first, {x}), {at::ones({32})});
  require_bit_equal(grad_of(second, {x}), {at::full({32}, 3.f)});
}

TEST_CASE("the same tensor saved twice with a write through data in between", "[hooks][offload]") {
  with_each_guard([](auto make) {
    const auto guard = make();
    const Tensor a = leaf({40}) * 1, before = a.detach().clone();
    const SavedVariable first(a, false);
    a.data().fill_(2);
    const SavedVariable second(a, false);
    const Tensor back = second.unpack();
    CHECK(at::equal(back, at::full({40}, 2.f)));
    // As plain autograd has it, or the values of the save.
    const Tensor old = first.unpack();
    CHECK((at::equal(old, before) || at::equal(old, back)));
  });
}

TEST_CASE("a write through data is seen by a second save, wherever it is", "[hooks][offload]") {
  const Folder folder;
  constexpr int64_t num_elements = 3 * (1 << 14) + 5;  // some parts of what is compared at once
  const int64_t element = GENERATE(int64_t{-1}, int64_t{0}, int64_t{1} << 14, num_elements - 1);
  CAPTURE(element);
  const SaveOnDiskGuard guard(all_in(folder));
  const Tensor a = leaf({num_elements}) * 1;
  const SavedVariable first(a, false);
  if (element >= 0) a.data()[element] = 7;
  const SavedVariable second(a, false);
  CHECK(guard.counters().now().moves == (element < 0 ? 1 : 2));
  CHECK(bit_equal(second.unpack(), a));
}

TEST_CASE("who saves a tensor once does not read it", "[hooks][offload]") {
  constexpr std::size_t size = 1 << 16;
  const auto saves_unreadable = [&](auto make_guard) {
    void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                                /*fd=*/-1, /*offset=*/0);
    static_cast<char*>(memory)[5] = 42;
    ::mprotect(memory, size,
               PROT_NONE);  // whoever reads it is killed, and the system writes no byte of it
    const auto guard = make_guard();
    const SavedVariable saved(at::from_blob(memory, {static_cast<int64_t>(size)}, at::kByte),
                              false);
    guard->reset();
    ::mprotect(memory, size, PROT_READ | PROT_WRITE);
    return saved.unpack()[5].item<int64_t>() == 42 ? 0 : 1;
  };
  const Folder folder;
  CHECK(in_child([&] {
          return saves_unreadable([&] {
            return std::make_unique<std::optional<SaveOnDiskGuard>>(std::in_place, all_in(folder));
          });
        }) == 0);
#ifndef __SANITIZE_THREAD__  // it allows no threads in a child
  CHECK(in_child([&] {
          return saves_unreadable([&] {
            return std::make_unique<std::optional<remat::SaveInTiersGuard>>(
                std::in_place, remat::SaveInTiersOptions{
                                   .host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
          });
        }) == 0);
#endif
}

TEST_CASE("a backward that writes to what it unpacked does not spoil a second read",
          "[hooks][offload]") {
  struct Scribbles : torch::autograd::Function<Scribbles> {
    static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x) {
      ctx->save_for_backward({x});
      return x.sin();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                   torch::autograd::variable_list grads) {
      const Tensor x = ctx->get_saved_variables()[0];
      const Tensor grad = grads[0] * x.cos();
      const at::NoGradGuard no_grad;
      x.detach().zero_();
      return {grad};
    }
  };
  const Folder folder;
  const Tensor x = leaf({64});
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    const Tensor h = x + 1;
    y = Scribbles::apply(h) * h.exp();
  }
  const Tensor first = grad_of(y, {x}, {.retain_graph = true})[0];
  require_bit_equal(grad_of(y, {x}), {first});
}

TEST_CASE("a second read shares the first one's bytes, unless those were changed",
          "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({64});
  Tensor y, expected;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    const Tensor h = x + 1;
    expected = h.detach().clone();
    y = h.sin();
  }
  const Tensor first = read_saved(y, &nodes::SinBackward0::self_);
  CHECK(read_saved(y, &nodes::SinBackward0::self_).is_alias_of(first));
  {
    const at::NoGradGuard no_grad;
    first.detach().zero_();
  }
  const Tensor second = read_saved(y, &nodes::SinBackward0::self_);
  CHECK(bit_equal(second, expected));
  CHECK_FALSE(second.is_alias_of(first));
}

// ---- in another type -------------------------------------------------------------------------

TEST_CASE("SaveAsGuard keeps half the bytes and gives back the dtype", "[hooks][offload]") {
  const Tensor x = leaf({1024});
  const LiveBytes bytes;
  Tensor y;
  {
    const SaveAsGuard guard(at::kBFloat16);
    y = (x + 1).sin();
  }
  CHECK(bytes.held() == 1024 * 4 + 1024 * 2);
  const Tensor saved = read_saved(y, &nodes::SinBackward0::self_);
  CHECK(saved.scalar_type() == at::kFloat);
  require_bit_equal({saved.detach()}, {(x + 1).detach().to(at::kBFloat16).to(at::kFloat)});
  require_bit_equal(grad_of(y, {x}), {(x + 1).detach().to(at::kBFloat16).to(at::kFloat).cos()});
}

TEST_CASE("SaveAsGuard rounds only what its type can hold", "[hooks][offload]") {
  const auto through = [](at::ScalarType dtype, const Tensor& t) {
    SavedVariable variable;
    {
      const SaveAsGuard guard(dtype);
      variable = SavedVariable(t, false);
    }
    return variable.unpack();
  };
  const Tensor numbers = at::tensor({1.f / 3, 65504.f, -2e-3f, 0.f});
  CHECK(at::equal(through(at::kHalf, numbers), numbers.to(at::kHalf).to(at::kFloat)));
  const auto inf = std::numeric_limits<float>::infinity();
  for (const Tensor& stays :
       {at::tensor({1.f / 3, 70000.f}), at::tensor({1.f / 3, -1e30f, inf}),
        at::randint(1 << 30, {9}), at::ones({3}, at::kBool), at::randn({4}).to(at::kBFloat16),
        at::randn({4}, at::kComplexFloat),
        at::tensor({1.f / 3, 1e-30f}).to(at::kBFloat16)})  // as many bytes, fewer exponents
    CHECK(bit_equal(through(at::kHalf, stays), stays));
  for (const Tensor& odd : {at::tensor({1.f / 3, inf, -inf}), at::tensor({1.f / 3, NAN, 2.f})})
    CHECK(bit_equal(through(at::kHalf, odd), odd.to(at::kHalf).to(at::kFloat)));
  for (const Tensor& wide : {at::randn({4}), at::randn({4}, at::kHalf)})
    CHECK(bit_equal(through(at::kDouble, wide), wide));
  const Tensor z = at::randn({4}, at::kComplexDouble);
  CHECK(bit_equal(through(at::kComplexFloat, z), z.to(at::kComplexFloat).to(at::kComplexDouble)));
  CHECK(bit_equal(through(at::kComplexFloat, z.conj()),
                  z.conj().resolve_conj().to(at::kComplexFloat).to(at::kComplexDouble)));
  for (const auto narrow : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const Tensor small = at::tensor({1.f / 3, 200.f, -0.25f});
    CHECK(at::equal(through(narrow, small), small.to(narrow).to(at::kFloat)));
    const Tensor large = at::tensor({1.f / 3, 1e6f});
    CHECK(bit_equal(through(narrow, large), large));
  }
  for (const auto dtype : {at::kInt, at::kBool, at::kQInt8})
    CHECK_THROWS_AS(SaveAsGuard(dtype), c10::ValueError);
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 7
  CHECK_THROWS_AS(SaveAsGuard(at::kFloat8_e8m0fnu), c10::ValueError);
#endif
}
