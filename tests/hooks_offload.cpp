// Guards of hooks.h that keep saved tensors elsewhere, on the CPU: what comes back, what is held,
// disks.

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/version.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "remat/place.h"
#include "remat/report.h"
#include "remat/tiers.h"
#include "tests/support/files.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/sizes.h"
#include "tests/support/warnings.h"

namespace fs = std::filesystem;
using remat::checkpoint;
using remat::SaveAsGuard;
using remat::SavedTensorHooksGuard;
using remat::SaveOnCpuGuard;
using remat::SaveOnDiskGuard;
using torch::autograd::SavedVariable;

namespace {

constexpr auto changed = "modified by an inplace operation";

/// A place of a program's own. `is_late`: it copies as late as it may.
class InMemory final : public remat::Place {
 public:
  explicit InMemory(bool is_late) : is_late_(is_late) {}
  std::shared_ptr<remat::StoredContents> begin_store(const Tensor& flat) override {
    return std::make_shared<Copy>(flat, is_late_);
  }

 private:
  class Copy final : public remat::StoredContents {
   public:
    Copy(const Tensor& flat, bool is_late)
        : is_late_(is_late), held_(is_late ? flat : flat.clone()) {}
    bool is_stored_late() const override { return is_late_; }
    void finish_store() override { held_ = held_.clone(); }
    void begin_load() override { loaded_ = held_.clone(); }
    void cancel_load() override { loaded_.reset(); }
    Tensor finish_load() override {
      return loaded_.defined() ? std::exchange(loaded_, Tensor()) : held_.clone();
    }

   private:
    const bool is_late_;
    Tensor held_, loaded_;
  };
  const bool is_late_;
};

/// Each guard in turn, for `f(name, make)`: `make` returns a guard of any size of tensors.
template <class F>
void with_each_guard(F&& f) {
  const Folder folder;
  const auto on_cpu = [] { return std::make_unique<SaveOnCpuGuard>(); };
  const auto on_disk = [&] {
    return std::make_unique<SaveOnDiskGuard>(
        remat::SaveOnDiskOptions{.directory = folder.path(), .min_bytes = 0});
  };
  const auto in_tiers = [&] {
    return std::make_unique<remat::SaveInTiersGuard>(
        remat::SaveInTiersOptions{.host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
  };
  const auto as_itself = [] { return std::make_unique<SaveAsGuard>(at::kDouble); };
  const auto elsewhere = [](bool is_late) {
    return [is_late] {
      return std::make_unique<remat::SaveElsewhereGuard>(
          std::make_unique<InMemory>(is_late),
          remat::SaveElsewhereOptions{.max_bytes_in_flight = 1 << 10});
    };
  };
  {
    INFO("SaveOnCpuGuard");
    f(on_cpu);
  }
  {
    INFO("SaveOnDiskGuard");
    f(on_disk);
  }
  {
    INFO("SaveAsGuard");
    f(as_itself);
  }
  {
    INFO("SaveInTiersGuard");
    f(in_tiers);
  }
  {
    INFO("SaveElsewhereGuard");
    f(elsewhere(false));
  }
  {
    INFO("SaveElsewhereGuard, stored late");
    f(elsewhere(true));
  }
}

template <class T>
bool same_layout(const T& a, const T& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset() && a.dtype() == b.dtype() &&
         a.device() == b.device() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
         a.requires_grad() == b.requires_grad();
}

/// Runs in a process of its own; its exit status.
template <class F>
int in_child(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(f());
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
    }
    ::_exit(99);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

remat::SaveOnDiskOptions all_in(const Folder& folder) {
  return {.directory = folder.path(), .min_bytes = 0};
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
  // Of (x + 1).sin(), beside its result: x + 1, which sin saves.
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

// ---- in place --------------------------------------------------------------------------------

TEST_CASE(
    "a tensor that is changed in place after it was saved raises or has the values of the save",
    "[hooks][offload]") {
  const Tensor x = leaf({128});
  with_each_guard([&](auto make) {
    const auto guard = make();
    const auto check = [&](const Tensor& y, const Tensor& expected) {
      try {
        require_bit_equal(grad_of(y, {x}), {expected});
      } catch (const c10::Error& e) {
        CHECK_THAT(e.what(), contains(changed));
      }
    };
    {
      const Tensor y = x.exp(), expected = y.detach().clone();
      y.detach().mul_(2);
      check(y, expected);
    }
    {  // does not require grad: copied when the next operator saves
      const Tensor mask = at::full({128}, 2.f);
      const Tensor y = x * mask;
      mask.mul_(3);
      const Tensor z = x.exp();
      check(y, at::full({128}, 2.f));
    }
    {
      const Tensor mask = at::full({128}, 2.f);
      const Tensor y = x * mask;
      const Tensor z = x.exp();
      mask.mul_(3);
      check(y, at::full({128}, 2.f));
    }
    {  // other tensors put into the object that was saved
      const Tensor mask = at::full({128}, 2.f);
      const Tensor y = x * mask;
      mask.set_data(at::full({128}, 5.f));
      check(y, at::full({128}, 2.f));
    }
  });
}

TEST_CASE("a parameter that stays and is changed in place raises as plain autograd does",
          "[hooks][offload]") {
  with_each_guard([](auto make) {
    const Tensor x = leaf({4}), p = leaf({4});
    const auto guard = make();
    const Tensor y = x * p;
    const auto version = p._version();
    {
      at::NoGradGuard no_grad;
      p.add_(1);
    }
    const auto error = error_of<c10::Error>([&] { grad_of(y, {x}); });
    CHECK_THAT(text_of(error), contains(changed));
    CHECK_THAT(text_of(error),
               contains("is at version " + std::to_string(version + 1) + "; expected version " +
                        std::to_string(version) + " instead"));
  });
  drop_ready_nodes();
}

TEST_CASE("a saved tensor whose storage was made smaller raises", "[hooks][offload]") {
  with_each_guard([](auto make) {
    const Tensor x = leaf({400}), p = leaf({400});
    const auto guard = make();
    const Tensor y = x * p;
    p.storage().unsafeGetStorageImpl()->set_nbytes(16);
    CHECK_THROWS_WITH(grad_of(y, {x}), contains("was made smaller before backward"));
    p.storage().unsafeGetStorageImpl()->set_nbytes(1600);
  });
  drop_ready_nodes();
}

TEST_CASE("a copy never holds what the kernel has yet to write", "[hooks][offload]") {
  const Tensor start = at::randn({64, 33}, at::kDouble);
  const bool in_place = GENERATE(false, true), next_inside = GENERATE(false, true);
  const Seed seed(3);
  const auto run = [&](auto make) {
    at::manual_seed(5);
    const Tensor x = start.clone().requires_grad_();
    Tensor y;
    {
      [[maybe_unused]] const auto guard = make();
      Tensor h = x * 1;
      y = in_place ? at::rrelu_(h, 0.1, 0.9, /*training=*/true)
                   : at::rrelu(h, 0.1, 0.9, /*training=*/true);
      if (next_inside) y = y.sin();
    }
    return grad_of(y, {x});
  };
  const Tensors plain = run([] { return 0; });
  with_each_guard([&](auto make) { require_bit_equal(run(make), plain); });
  const Tensors rounded = run([] { return std::make_unique<SaveAsGuard>(at::kFloat); });
  CHECK(at::allclose(rounded[0], plain[0], 1e-5, 1e-6));
}

TEST_CASE("random programs with views, in-place operators and regions: right gradients or an error",
          "[hooks][offload]") {
  const Seed seed;
  // What a saved tensor's clone gives is right: it has the values of the save. The noise of rrelu
  // is not written by then, and nobody changes it later.
  const auto cloning_if = [](bool always) {
    return std::make_unique<SavedTensorHooksGuard>(
        [always](const Tensor& t) { return always || t.requires_grad() ? t.clone() : t; },
        [](const Tensor& t) { return t; });
  };
  const auto cloning = [&] { return cloning_if(true); };
  const auto run = [&](uint64_t program, auto make,
                       bool is_right = false) -> std::optional<Tensors> {
    std::mt19937 choose(static_cast<std::mt19937::result_type>(program));
    at::manual_seed(program);
    const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(choose() % n); };
    const Tensors leaves{leaf({6, 6}, at::kDouble), leaf({6, 6}, at::kDouble)};
    Tensors all{leaves[0] + 1, leaves[1].t() * 2, leaves[0]};
    Tensors masks{at::rand({6, 6}, at::kDouble),
                  at::rand({12, 12}, at::kDouble).slice(1, 2, 8).slice(0, 3, 9)};
    const auto square = [](const Tensor& t) {
      return t.reshape({-1}).slice(0, 0, 36).reshape({6, 6});
    };
    try {
      {
        auto guard = make();
        for (int step = 0; step < 14; ++step) {
          const Tensor a = all[pick(all.size())], b = all[pick(all.size())];
          Tensor& mask = masks[pick(masks.size())];
          Tensor made;
          switch (pick(13)) {
            case 0:
              made = a.sin();
              break;
            case 1:
              made = a * b;
              break;
            case 2:
              made = a * mask;
              break;
            case 3:
              made = a.t();
              break;
            case 4:
              made = at::cat({a, b}).slice(0, 3, 9);
              break;
            case 5:
              made = square(a.slice(1, 0, 3).contiguous().expand({4, 6, 3}));
              break;
            case 6: {
              const auto inner = is_right ? cloning_if(false) : nullptr;
              made = at::rrelu(a, 0.1, 0.3, true);
            } break;
            case 7:
              made = at::dropout(a, 0.3, true);
              break;
            case 8: {
              const at::NoGradGuard no_grad;
              mask.mul_(1.25);
              continue;
            }
            case 9: {
              if (a.is_leaf() || (a.is_view() && a._base().is_leaf())) continue;
              const Tensor changed_one = a.slice(0, 1, 3).mul_(0.5);
              continue;
            }
            case 10:
              made = checkpoint([&](const Tensor& t) { return (t * t.sin()).exp().tanh(); }, a);
              break;
            case 11:
              made = a.softmax(1).mm(b);
              break;
            case 12:
              made = (a.chunk(2)[0] * a.chunk(2)[1]).repeat({2, 1}).tanh();
              break;
          }
          all.push_back(made);
        }
        if (pick(2) == 0) guard.reset();
        Tensor sum = at::zeros({}, at::kDouble);
        for (const Tensor& each : all) sum = sum + each.sigmoid().sum();
        const Tensors once = grad_of(sum, leaves, {.retain_graph = true, .allow_unused = true});
        const Tensors twice = grad_of(sum, leaves, {.retain_graph = false, .allow_unused = true});
        require_bit_equal(twice, once);
        return once;
      }
    } catch (const c10::Error& e) {
      if (std::string(e.what()).find(changed) == std::string::npos) throw;
      return std::nullopt;
    }
  };
  int compared = 0;
  for (uint64_t i = 0; i < 150; ++i) {
    const uint64_t program = seed.value() * 1000 + i;
    CAPTURE(program);
    const auto right = run(program, cloning, true);
    REQUIRE(right.has_value());
    with_each_guard([&](auto make) {
      if (const auto found = run(program, make)) {
        require_bit_equal(*found, *right);
        ++compared;
      }
    });
  }
  CHECK(compared > 150);
  drop_ready_nodes();
}

// ---- on disk ---------------------------------------------------------------------------------

TEST_CASE("tensors wait in one unnamed private file that goes with the graph", "[hooks][offload]") {
  using Mul = nodes::MulBackward0;
  const Folder folder;
  const Tensor x = leaf({64, 64});
  const LiveBytes bytes;
  {
    Tensor y;
    {
      const SaveOnDiskGuard guard(all_in(folder));
      const Tensor a = x + 1;
      y = a * a;
      CHECK(folder.num_entries() == 0);
      const auto status = folder.status();
      CHECK(status.st_nlink == 0);
      CHECK((status.st_mode & 0777) == 0600);
      CHECK(status.st_uid == ::geteuid());
      CHECK(status.st_size == 64 * 64 * 4);
    }
    CHECK(bytes.held() == bytes_of(y));
    CHECK(folder.open_files().size() == 1);
    CHECK(at::equal(read_saved(y, &Mul::self_), x + 1));
    CHECK(at::equal(grad_of(y, {x}, {.retain_graph = true})[0], 2 * (x + 1)));
    CHECK(at::equal(grad_of(y, {x})[0], 2 * (x + 1)));
    CHECK(folder.open_files().empty());  // backward has let go of the last range
  }
  CHECK(folder.num_entries() == 0);
}

TEST_CASE("ten thousand tensors wait on disk with few file descriptors", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4}, at::kDouble);
  const Limit descriptors(RLIMIT_NOFILE, 64);
  const LiveBytes bytes;
  const auto f = [](Tensor t) {
    for (int i = 0; i < 10000; ++i) t = t.sin();
    return t;
  };
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    y = f(x);
    CHECK(bytes.held() == bytes_of(y));
    CHECK(folder.open_files().size() == 1);
  }
  const Tensor grad = grad_of(y, {x})[0];
  CHECK(folder.open_files().empty());
  require_bit_equal({grad}, grad_of(f(x), {x}));
}

TEST_CASE("ranges of the file are used again, and neighbours merge", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({1024});
  const SaveOnDiskGuard guard(all_in(folder));
  int64_t after_first = 0;
  for (int step = 0; step < 20; ++step) {
    Tensor y = x + 1;
    for (int i = 0; i < 10; ++i) y = y.sin();
    if (step == 0) after_first = folder.status().st_size;
    // Larger than any single one that was freed: only merged ranges hold it.
    if (step % 2 == 1) y = at::cat({y, y, y, y, y, y, y, y}).sin();
    grad_of(y, {x});
  }
  CHECK(after_first == 10 * 4096);
  CHECK(folder.status().st_size <= after_first + 8 * 4096);
}

TEST_CASE("a full disk is an error that names directory and bytes, and loses nothing",
          "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4096});
  const LiveBytes bytes;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    const Tensor before = (x + 1).sin();
    const auto program = [&] { return (x + 2).sin().sin(); };
    {
      const FileSizeLimit limit(40000);
      const auto error = error_of<c10::Error>(program);
      CHECK_THAT(text_of(error), contains("could not be written to a file in \"" + folder.path()));
      CHECK_THAT(text_of(error), contains("16384 bytes of a saved tensor"));
      CHECK_THAT(text_of(error), contains("File too large"));
    }
    const Tensor again = program();  // there is room now
    require_bit_equal(grad_of(before, {x}), {(x + 1).cos().detach()});
    Tensors plain;
    {
      const SaveOnCpuGuard in_memory;
      plain = grad_of(program(), {x});
    }
    require_bit_equal(grad_of(again, {x}), plain);
  }
  CHECK(bytes.held() == 0);
  CHECK(folder.open_files().empty());
}

TEST_CASE("a file size limit is an error, and no signal comes of it", "[hooks][offload]") {
  static std::atomic<int> num_signals{0};
  struct Handler {
    void (*const before)(int) = std::signal(SIGXFSZ, [](int) { ++num_signals; });
    ~Handler() { std::signal(SIGXFSZ, before); }
  } const handler;
  const auto is_blocked = [] {
    sigset_t mask{};
    ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    return sigismember(&mask, SIGXFSZ) == 1;
  };
  const auto is_pending = [] {
    sigset_t pending{};
    ::sigpending(&pending);
    return sigismember(&pending, SIGXFSZ) == 1;
  };
  const Folder folder;
  const Tensor x = leaf({4096});
  const auto write = [&] {
    const SaveOnDiskGuard guard(all_in(folder));
    (x + 2).sin().sin();
  };
  const Limit limit(RLIMIT_FSIZE, 20000);
  CHECK_THAT(text_of(error_of<c10::Error>(write)), contains("File too large"));
  CHECK(num_signals == 0);
  CHECK_FALSE(is_blocked());

  // A signal of the program's that waits goes on waiting.
  sigset_t signal{};
  sigemptyset(&signal);
  sigaddset(&signal, SIGXFSZ);
  ::pthread_sigmask(SIG_BLOCK, &signal, nullptr);
  CHECK_THROWS_AS(write(), c10::Error);
  CHECK_FALSE(is_pending());
  ::pthread_kill(::pthread_self(), SIGXFSZ);
  CHECK_THROWS_AS(write(), c10::Error);
  CHECK(is_pending());
  CHECK(num_signals == 0);
  CHECK(is_blocked());
  ::pthread_sigmask(SIG_UNBLOCK, &signal, nullptr);
  CHECK(num_signals == 1);
}

TEST_CASE("tiers keep what a file size limit refuses, and no signal comes of it",
          "[hooks][tiers]") {
  const auto program = [](const Tensor& t) { return t.sin().cos().exp().sin().cos(); };
  const Folder folder;
  const Tensor x = leaf({4096});
  const Limit limit(RLIMIT_FSIZE, 20000);  // the signal would end this process
  std::optional<remat::SaveInTiersGuard> guard;
  guard.emplace(
      remat::SaveInTiersOptions{.host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
  const remat::TierCounters counters = guard->counters();
  const Tensor y = program(x);
  guard.reset();
  // They are written beside the program.
  for (int i = 0; i < 1000 && counters.now().failed_writes == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(counters.now().failed_writes > 0);
  require_bit_equal(grad_of(y, {x}), grad_of(program(x), {x}));
}

TEST_CASE("a disk that is full at the guard's end leaves the tensor in memory",
          "[hooks][offload]") {
  Warnings warnings;
  const Folder folder;
  const Tensor x = leaf({4096});
  Tensor y;
  {
    const FileSizeLimit limit(100);
    const SaveOnDiskGuard guard(all_in(folder));
    y = x * at::full({4096}, 2.f);
  }
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("a saved tensor stays in memory"));
  require_bit_equal(grad_of(y, {x}), {at::full({4096}, 2.f)});
}

TEST_CASE("a directory in which no file can be made is refused with its name", "[hooks][offload]") {
  const Folder folder;
  const std::string file = folder.path() + "/file";
  std::ofstream(file) << "not a directory";
  for (const std::string& path : {folder.path() + "/missing", file, std::string()}) {
    const auto error =
        error_of<c10::ValueError>([&] { const SaveOnDiskGuard guard({.directory = path}); });
    CHECK_THAT(text_of(error), contains("no file could be made in the directory \"" + path + "\""));
  }
  const Tensor x = leaf({4});  // nothing is left on the stack of scopes
  require_bit_equal(grad_of(x.sin(), {x}), {x.cos().detach()});
}

TEST_CASE("nothing is left on disk by a process that is killed, exits or throws",
          "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4096});
  const auto save = [&] {
    const SaveOnDiskGuard guard(all_in(folder));
    return (x + 1).sin();
  };
  CHECK(in_child([&] {
          const SaveOnDiskGuard guard(all_in(folder));
          const Tensor y = (x + 1).sin();
          std::raise(SIGKILL);
          return 0;
        }) == -SIGKILL);
  CHECK(in_child([&] {
          const Tensor y = save();
          ::_exit(7);
          return 0;
        }) == 7);
  CHECK(in_child([&] {
          const SaveOnDiskGuard guard(all_in(folder));
          const Tensor y = (x + 1).sin();
          throw std::runtime_error("expected");
          return 0;
        }) == 99);
  CHECK(folder.num_entries() == 0);
}

TEST_CASE("parent and child of a fork do not write over each other", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4096});
  const SaveOnDiskGuard guard(all_in(folder));
  // Read without a backward, which LibTorch refuses in a child if its engine has threads.
  const auto save = [&](double shift) { return SavedVariable(x + shift, /*is_output=*/false); };
  const auto right = [&](const SavedVariable& saved, double shift) {
    return bit_equal(saved.unpack().detach(), (x + shift).detach());
  };
  SavedVariable old = save(1);
  const SavedVariable kept = save(3);
  int pipes[2];
  REQUIRE(::pipe(pipes) == 0);
  CHECK(in_child([&] {
          old = SavedVariable();
          const SavedVariable mine = save(2);  // would take the range of `old` in a shared file
          char go = 1;
          if (::write(pipes[1], &go, 1) != 1) return 1;
          return right(mine, 2) && right(kept, 3) ? 0 : 2;
        }) == 0);
  CHECK(right(old, 1));
  CHECK(right(kept, 3));
  old = SavedVariable();
  const SavedVariable mine = save(5);
  CHECK(right(mine, 5));
  CHECK(right(kept, 3));
  ::close(pipes[0]);
  ::close(pipes[1]);
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

// ---- with regions, graphs and threads --------------------------------------------------------

TEST_CASE("offload guards and regions work in both orders", "[hooks][offload]") {
  const auto block = [](const Tensor& t) { return (t * t.sin()).exp().sin(); };
  const auto plain = [&](const Tensor& x) { return block(block(x + 1)); };
  with_each_guard([&](auto make) {
    const bool early_stop = GENERATE(true, false);
    require_same_grads(
        plain,
        [&](const Tensor& x) {
          const auto guard = make();
          const Tensor h = checkpoint({.early_stop = early_stop}, block, x + 1);
          return checkpoint(
              {.early_stop = early_stop}, [&](const Tensor& t) { return checkpoint(block, t); }, h);
        },
        leaf({6, 5}));
    Calls calls;
    require_same_grads(
        plain,
        [&](const Tensor& x) {
          return checkpoint(
              {.early_stop = early_stop, .policy = remat::save_ops({"aten::exp"})},
              [&](const Tensor& t) {
                calls();
                const Tensor h = block(t + 1);
                const auto guard = make();
                return block(h);
              },
              x);
        },
        leaf({6, 5}));
    CHECK(calls.count() == 2);
  });
}

TEST_CASE("a region under a SaveOnDiskGuard holds nothing in memory", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({1024});
  Calls calls;
  const auto block = counted(calls, [](const Tensor& t) { return t.sin().sin().sin(); });
  const Tensor h = (x + 1).detach().requires_grad_() * 1;
  const LiveBytes bytes;
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    y = checkpoint(block, checkpoint(block, h));
    CHECK(bytes.held() == bytes_of(y));
    CHECK(folder.status().st_size == 2 * 4096);  // the two inputs
  }
  const Tensor grad = grad_of(y, {h})[0];
  CHECK(calls.count() == 4);
  const auto f = [](const Tensor& t) { return t.sin().sin().sin(); };
  require_bit_equal({grad}, grad_of(f(f(h)), {h}));
}

TEST_CASE("a backward in inference mode reads what was moved", "[hooks][offload][rule-11]") {
  const Tensor x = leaf({64});
  const auto program = [&] { return (x * 1).sin().exp(); };
  const auto region = [&] {
    return remat::checkpoint([](const Tensor& t) { return (t * 1).sin().exp(); }, x * 1);
  };
  const auto offloading = [&] {
    const auto f = [](const Tensor& t) { return (t * 1).sin().exp(); };
    return remat::checkpoint({.offload_inputs = true}, f, x * 1);
  };
  const auto keeping = [&] {
    const auto f = [](const Tensor& t) { return (t * 1).sin().exp(); };
    return remat::checkpoint({.policy = remat::save_ops({"aten::sin"})}, f, x * 1);
  };
  const Tensors plain = grad_of(program(), {x});
  const Tensors rounded = [&] {
    const SaveAsGuard guard(at::kBFloat16);
    return grad_of(program(), {x});
  }();
  const auto check = [&](const Tensor& y, const Tensors& expected) {
    for (const bool is_inference : {true, false, true}) {
      const c10::InferenceMode mode(is_inference);
      const Tensors found = torch::autograd::grad({y}, {x}, {at::ones_like(y)},
                                                  /*retain_graph=*/true);
      const c10::InferenceMode normal(false);
      require_bit_equal({found[0].clone()}, expected);
    }
  };
  {
    Tensor y;
    {
      const SaveAsGuard guard(at::kBFloat16);
      y = program();
    }
    check(y, rounded);
  }
  with_each_guard([&](auto make) {
    for (const std::function<Tensor()>& each :
         std::initializer_list<std::function<Tensor()>>{program, region, offloading, keeping}) {
      Tensor y;
      {
        const auto guard = make();
        y = each();
      }
      check(y, plain);
    }
  });
}

TEST_CASE("double backward goes through tensors that were moved", "[hooks][offload]") {
  const Tensor x = leaf({9}, at::kDouble);
  const auto f = [](const Tensor& t) { return (t + 1).sin().exp() * t; };
  const auto second = [&](const Tensor& y) {
    const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
    const Tensor twice = grad_of(first.sin(), {x}, {.create_graph = true})[0];
    return grad_of(twice, {x})[0];
  };
  const Tensor plain = second(f(x));
  with_each_guard([&](auto make) {
    Tensor y;
    {
      const auto guard = make();
      y = f(x);
    }
    require_bit_equal({second(y)}, {plain});
    const auto guard = make();
    require_bit_equal({second(f(x))}, {plain});
  });
}

TEST_CASE("graphs die under each guard, and leave nothing", "[hooks][offload]") {
  const Folder folder;
  with_each_guard([](auto make) {
    const auto identity = [&](const Tensor& a) {
      const auto guard = make();
      const Tensor b = a + 1;
      const Tensor mask = at::ones({});
      return (b * mask * b.exp() * a).sin() * a.view({1});
    };
    CHECK(graph_dies(identity));
    CHECK(graph_dies([&](const Tensor& a) { return checkpoint(identity, a); }));
    CHECK(graph_dies([&](const Tensor& a) {
      const auto guard = make();
      return checkpoint([](const Tensor& t) { return t.exp().sin(); }, a + 1);
    }));
  });
}

TEST_CASE("threads that save and read under one guard get their own values",
          "[hooks][offload][threads]") {
  with_each_guard([](auto make) {
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    const Tensor shared = at::full({257}, 1.5f);
    for (int index = 0; index < 4; ++index)
      threads.emplace_back([&, index] {
        const auto guard = make();
        for (int step = 0; step < 20; ++step) {
          const Tensor x = at::full({257}, 0.1f * index + 0.01f * step).requires_grad_();
          const Tensor y = ((x + 1).sin() * shared).exp();
          const Tensor first = grad_of(y, {x}, {.retain_graph = true})[0];
          const Tensor s = (x + 1).sin().detach(), e = (s * shared).exp();
          if (!at::allclose(first, e * shared * (x + 1).cos().detach())) ++wrong;
          if (!at::equal(grad_of(y, {x})[0], first)) ++wrong;
        }
      });
    for (std::thread& each : threads) each.join();
    CHECK(wrong == 0);
  });
}

TEST_CASE("several threads read the same moved tensors of a retained graph at once",
          "[hooks][offload][threads]") {
  const Folder folder;
  const Tensor x = leaf({2000});
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    y = (x + 1).sin().exp().sin();
  }
  const Tensor expected = grad_of(y, {x}, {.retain_graph = true})[0];
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int index = 0; index < 4; ++index)
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i)
        if (!at::equal(grad_of(y, {x}, {.retain_graph = true})[0], expected)) ++wrong;
    });
  for (std::thread& each : threads) each.join();
  CHECK(wrong == 0);
}

TEST_CASE("offload_inputs changes nothing on the CPU", "[hooks][offload]") {
  const Tensor mask = at::randn({6}) > 0;
  const auto f = [](const Tensor& t, const Tensor& m) { return (t * m).sin().exp(); };
  require_same_grads(
      [&](const Tensor& x) { return f(x + 1, mask); },
      [&](const Tensor& x) { return checkpoint({.offload_inputs = true}, f, x + 1, mask); },
      leaf({6}));
  const Tensor x = leaf({6}), h = x + 1;
  const Tensor y = checkpoint({.offload_inputs = true}, f, h, mask);
  h.detach().mul_(2);
  CHECK_THROWS_WITH(grad_of(y, {x}), contains(changed));
  drop_ready_nodes();
}
