// Recomputing ahead: handles of regions, and CheckpointOptions::prepare_ahead.

#include "remat/region_handle.h"

#include <thread>

#include "tests/support/meeting.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::RegionHandle;
using remat::regions_of;
using Kind = remat::CheckpointError::Kind;

namespace {

std::shared_ptr<RegionHandle> new_handle() { return std::make_shared<RegionHandle>(); }

Tensor wave(const Tensor& t) { return t.sin().exp().cos(); }

int64_t bytes_prepared() { return remat::counters().recomputed_bytes_alive; }

std::vector<std::string> names_of(const std::vector<RegionHandle>& handles) {
  std::vector<std::string> names;
  for (const RegionHandle& each : handles) names.push_back(each.name());
  return names;
}

}  // namespace

TEST_CASE("a handle recomputes its region, and the next backward takes the tensors", "[prepare]") {
  const Tensor x = leaf({8});
  const Tensors plain = grad_of(wave(x), {x});
  const auto handle = new_handle();
  CHECK_FALSE(handle->prepare());
  Calls calls;
  const Tensor y = checkpoint({.name = "wave", .handle = handle}, counted(calls, wave), x);
  CHECK(handle->name() == "wave");
  CHECK(handle->prepare());
  CHECK(calls.count() == 2);
  CHECK(bytes_prepared() == 3 * 8 * 4);
  CHECK(handle->prepare());  // they are there
  CHECK(calls.count() == 2);
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(calls.count() == 2);
  CHECK(bytes_prepared() == 0);
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(calls.count() == 3);
  CHECK(handle->prepare());
  handle->release();
  CHECK(bytes_prepared() == 0);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(calls.count() == 5);
}

TEST_CASE("a handle keeps no graph alive", "[prepare]") {
  const auto handle = new_handle();
  LiveBytes bytes;
  CHECK(graph_dies([&](const Tensor& x) {
    const Tensor y = checkpoint({.name = "a", .handle = handle}, wave, x);
    handle->prepare();
    return y;
  }));
  CHECK(bytes.held() == 0);
  CHECK_FALSE(handle->prepare());
  CHECK(handle->name().empty());
  handle->release();
}

TEST_CASE("prepared tensors that a backward does not read are dropped at its end", "[prepare]") {
  const Tensor x = leaf({8}), w = leaf({8});
  const auto handle = new_handle();
  Calls calls;
  const auto f = [](const Tensor& a, const Tensor& b) { return Tensors{a.sin(), b.exp()}; };
  const Tensors y = checkpoint({.handle = handle}, counted(calls, f), x, w);
  handle->prepare();
  require_bit_equal(grad_of(y[0], {x}, {.retain_graph = true}), grad_of(x.sin(), {x}));
  CHECK(calls.count() == 2);
  CHECK(bytes_prepared() == 0);
  require_bit_equal(grad_of(y[1], {w}), grad_of(w.exp(), {w}));
  CHECK(calls.count() == 3);
}

TEST_CASE("an inner region prepares the regions around it first, each once", "[prepare]") {
  const Tensor x = leaf({8});
  Calls outer, inner;
  const auto block = [&](const Tensor& t) {
    return checkpoint({.name = "inner"}, counted(inner, wave), t.sin()).tanh();
  };
  const Tensors plain = grad_of(wave(x.sin()).tanh(), {x});
  const Tensor y = checkpoint({.name = "outer"}, counted(outer, block), x);
  const auto regions = regions_of(y);
  REQUIRE(names_of(regions) == std::vector<std::string>{"outer", "inner"});
  Counted done;
  CHECK(regions[1].prepare());
  CHECK(done.now().recomputes == 2);
  CHECK(regions[0].prepare());
  CHECK(done.now().recomputes == 2);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(done.now().recomputes == 2);
  CHECK(outer.count() == 2);
  CHECK(bytes_prepared() == 0);
}

TEST_CASE("an inner region is prepared again after a release, with strict_unpack around it",
          "[prepare]") {
  const Tensor x = leaf({8});
  const auto block = [](const Tensor& t) {
    return checkpoint({.strict_unpack = true}, wave, t.sin()).tanh();
  };
  const Tensor y = checkpoint({.strict_unpack = true}, block, x);
  const RegionHandle inner = regions_of(y)[1];
  for (int i = 0; i < 3; ++i) {
    CHECK(inner.prepare());
    inner.release();
  }
  CHECK(inner.prepare());
  require_bit_equal(grad_of(y, {x}), grad_of(wave(x.sin()).tanh(), {x}));
  CHECK(bytes_prepared() == 0);
}

TEST_CASE("regions_of lists regions in the order of backward, and computes nothing", "[prepare]") {
  const Tensor x = leaf({4});
  Tensor y = x;
  Counted done;
  for (const char* const name : {"a", "b", "c"}) y = checkpoint({.name = name}, wave, y * 2);
  CHECK(names_of(regions_of(y)) == std::vector<std::string>{"c", "b", "a"});
  CHECK(done.now().recomputes == 0);
  CHECK(regions_of(x).empty());
  CHECK(regions_of(Tensor()).empty());
}

TEST_CASE("a group or a cache around takes prepared tensors over", "[prepare]") {
  const Tensor x = leaf({8}), w = leaf({8});
  const bool is_before = GENERATE(true, false);
  CAPTURE(is_before);
  const auto f = [](const Tensor& a, const Tensor& b) { return Tensors{a.sin(), b.exp()}; };
  const Tensors expected{x.cos(), w.exp()};
  Calls calls;
  const auto handle = new_handle();
  const Tensors y = checkpoint({.handle = handle}, counted(calls, f), x, w);
  const auto both = [&] {
    require_bit_equal(grad_of(y[0], {x}, {.retain_graph = true}), {expected[0]});
    require_bit_equal(grad_of(y[1], {w}, {.retain_graph = true}), {expected[1]});
  };
  if (is_before) handle->prepare();
  {
    const remat::GraphExecGroup group;
    handle->prepare();
    both();
    CHECK(calls.count() == 2);
  }
  CHECK(bytes_prepared() == 0);
  if (is_before) handle->prepare();
  {
    const remat::RecomputeCacheGuard cache;
    handle->prepare();
    both();
    both();
    CHECK(calls.count() == 3);
  }
  CHECK(bytes_prepared() == 0);
  // A cache without room leaves them to the first backward.
  if (is_before) handle->prepare();
  const remat::RecomputeCacheGuard small({.max_bytes = 8});
  handle->prepare();
  require_bit_equal(grad_of(y[0], {x}, {.retain_graph = true}), {expected[0]});
  CHECK(calls.count() == 4);
  CHECK(bytes_prepared() == 0);
}

TEST_CASE("prepared tensors of a region whose capture changed are not used", "[prepare]") {
  const Tensor x = leaf({8}), weight = leaf({8});
  const auto f = [&](const Tensor& t) { return (t * weight).exp(); };
  const auto handle = new_handle();
  const Tensor y = checkpoint({.handle = handle}, f, x);
  handle->prepare();
  {
    const at::NoGradGuard no_grad;
    weight.mul_(2);
  }
  CHECK(mismatch_of(y, x).kind() == Kind::CaptureChanged);
  CHECK(bytes_prepared() == 0);
}

TEST_CASE("prepared tensors serve double backward, early stop and random numbers", "[prepare]") {
  const bool early_stop = GENERATE(true, false);
  const Tensor x = leaf({64});
  const auto f = [](const Tensor& t) { return at::dropout(t.sin() * t, 0.5, true).exp() + 1; };
  const auto program = [&](auto run) {
    at::manual_seed(3);
    const Tensor y = run(x);
    const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
    return Tensors{first.detach(), grad_of(first.exp(), {x})[0], at::rand({2})};
  };
  Counted done;
  const Tensors found = program([&](const Tensor& t) {
    const auto handle = new_handle();
    const Tensor y = checkpoint({.early_stop = early_stop, .handle = handle}, f, t);
    handle->prepare();
    CHECK(done.now().recomputes == 1);
    return y;
  });
  require_bit_equal(found, program(f));
}

TEST_CASE("a failure of prepare leaves nothing, and the region can be prepared again",
          "[prepare]") {
  const Tensor x = leaf({8});
  Calls calls;
  bool fails = false;
  const auto handle = new_handle();
  const auto f = [&](const Tensor& t) {
    const Tensor y = t.sin();
    if (fails) throw std::runtime_error("no");
    return y.exp();
  };
  const Tensor y = checkpoint({.handle = handle}, counted(calls, f), x);
  fails = true;
  CHECK_THROWS_WITH(handle->prepare(), "no");
  CHECK(bytes_prepared() == 0);
  fails = false;
  handle->prepare();
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
  CHECK(calls.count() == 3);
}

TEST_CASE("a region is not prepared before its function has returned", "[prepare]") {
  const Tensor x = leaf({8});
  std::string text;
  checkpoint(
      [&](const Tensor& t) {
        const Tensor y = t.sin();
        if (!remat::is_recomputing())
          text = text_of(error_of<remat::CheckpointError>([&] { regions_of(y)[0].prepare(); }));
        return y;
      },
      x);
  CHECK_THAT(text, contains("a region was prepared before its function returned"));
}

TEST_CASE("a backward waits for a region that another thread prepares", "[prepare]") {
  const Tensor x = leaf({8});
  Meeting begun(2);
  Calls calls;
  std::atomic<bool> meets{false};
  const auto handle = new_handle();
  const auto f = [&](const Tensor& t) {
    if (meets.exchange(false)) begun.wait();
    return wave(t);
  };
  const Tensor y = checkpoint({.handle = handle}, counted(calls, f), x);
  meets = true;
  std::thread other([&] { handle->prepare(); });
  begun.wait();
  require_bit_equal(grad_of(y, {x}), grad_of(wave(x), {x}));
  other.join();
  CHECK(calls.count() == 2);
  CHECK(bytes_prepared() == 0);
}

TEST_CASE("prepare while a backward holds tensors of the region computes nothing", "[prepare]") {
  const Tensor x = leaf({8});
  const auto handle = new_handle();
  Calls calls;
  const Tensor y = checkpoint({.handle = handle}, counted(calls, wave), x);
  y.register_hook([&](const Tensor&) { CHECK(handle->prepare()); });
  CHECK(calls.count() == 1);
  const Tensors plain = grad_of(wave(x), {x});
  require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(calls.count() == 2);
  CHECK(bytes_prepared() == 0);
}

// ---- prepare_ahead

namespace {

/// A chain of regions. Notes each run of a region, and in capitals the backward's arrival there.
struct Chain {
  std::string order;
  Tensor run(Tensor t, const std::string& names, int64_t ahead) {
    for (const char name : names) {
      t = checkpoint(
          {.name = {name}, .prepare_ahead = ahead},
          [this, name](const Tensor& value) {
            order += name;
            return wave(value);
          },
          t);
      t.register_hook(
          [this, name](const Tensor&) { order += static_cast<char>(name - 'a' + 'A'); });
    }
    return t;
  }
};

}  // namespace

TEST_CASE("prepare_ahead recomputes the regions that backward reads next", "[prepare]") {
  const auto [ahead, order] = GENERATE(table<int64_t, std::string>(
      {{0, "EeDdCcBbAa"}, {1, "EedDcCbBaA"}, {2, "EedcDbCaBA"}, {9, "EedcbaDCBA"}}));
  CAPTURE(ahead);
  const Tensor x = leaf({8});
  Chain chain;
  const auto plain = [&] {
    Tensor t = x;
    for (int i = 0; i < 5; ++i) t = wave(t);
    return t;
  };
  const Tensor y = chain.run(x, "abcde", ahead);
  for (int i = 0; i < 2; ++i) {
    chain.order.clear();
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), grad_of(plain(), {x}));
    CHECK(chain.order == order);
    CHECK(bytes_prepared() == 0);
  }
  const auto second_of = [&](const Tensor& z) {
    return grad_of(grad_of(z, {x}, {.create_graph = true})[0], {x});
  };
  require_bit_equal(second_of(y), second_of(plain()));
}

TEST_CASE("prepare_ahead leaves out regions that the backward does not run", "[prepare]") {
  const Tensor x = leaf({8});
  Chain chain;
  const Tensor first = chain.run(x, "ab", 3);
  const Tensor middle = chain.run(x * 2, "cd", 3);
  const Tensor last = chain.run(middle, "ef", 3);
  chain.order.clear();
  grad_of(last, {middle}, {.retain_graph = true});
  CHECK(chain.order == "FfeED");  // the gradient of "d" is captured
  chain.order.clear();
  grad_of(last, {x});
  CHECK(chain.order == "FfedcEDC");
  chain.order.clear();
  grad_of(first, {x});
  CHECK(chain.order == "BbaA");
}

TEST_CASE("prepare_ahead in nested regions recomputes each region once", "[prepare]") {
  const Tensor x = leaf({8});
  Calls calls;
  const auto inner = counted(calls, wave);
  const auto block = [&](const Tensor& t) {
    const Tensor a = checkpoint({.prepare_ahead = 2}, inner, t);
    return checkpoint({.prepare_ahead = 2}, inner, a.sin());
  };
  const auto plain = [](const Tensor& t) { return wave(wave(t).sin()); };
  Tensor y = x;
  for (int i = 0; i < 3; ++i) y = checkpoint({.prepare_ahead = 2}, block, y);
  const int64_t in_forward = calls.count();
  Counted done;
  require_bit_equal(grad_of(y, {x}), grad_of(plain(plain(plain(x))), {x}));
  CHECK(done.now().recomputes == 9);
  CHECK(in_forward == 6);
  CHECK(bytes_prepared() == 0);
}

TEST_CASE("prepare_ahead recomputes no region that waits for its inputs once more", "[prepare]") {
  const Tensor x = leaf({8});
  const remat::CheckpointOptions ahead{.strict_unpack = true, .prepare_ahead = 2};
  const auto inner = [](const Tensor& t) { return t.exp(); };
  const auto middle = [&](const Tensor& t) { return checkpoint(ahead, inner, t).sqrt(); };
  const auto outer = [&](const Tensor& t) { return checkpoint(ahead, middle, t); };
  const Tensor y = checkpoint(ahead, outer, x);
  Counted done;
  require_bit_equal(grad_of(y, {x}), grad_of(x.exp().sqrt(), {x}));
  CHECK(done.now().recomputes == 3);
}

TEST_CASE("a cache without room does not drop regions ahead before they are read", "[prepare]") {
  const Tensor x = leaf({8});
  Chain chain;
  const Tensor y = chain.run(x, "abcde", 2);
  for (const int64_t max_bytes : {8, 40, 10000}) {
    const remat::RecomputeCacheGuard cache({.max_bytes = max_bytes});
    for (int i = 0; i < 2; ++i) {
      chain.order.clear();
      Counted done;
      grad_of(y, {x}, {.retain_graph = true});
      CHECK(done.now().recomputes <= 5);
      if (max_bytes == 10000 && i == 1) CHECK(done.now().recomputes == 0);
    }
  }
  CHECK(bytes_prepared() == 0);
}

TEST_CASE("an error of a region ahead reaches the backward, which can be tried again",
          "[prepare]") {
  const Tensor x = leaf({8});
  bool fails = false;
  const auto f = [&](const Tensor& t) {
    if (fails) throw std::runtime_error("ahead");
    return wave(t);
  };
  const Tensor y = checkpoint({.prepare_ahead = 1}, wave, checkpoint({.prepare_ahead = 1}, f, x));
  fails = true;
  CHECK_THROWS_WITH(grad_of(y, {x}, {.retain_graph = true}), "ahead");
  CHECK(bytes_prepared() == 0);
  fails = false;
  require_bit_equal(grad_of(y, {x}), grad_of(wave(wave(x)), {x}));
}

TEST_CASE("a negative prepare_ahead is refused", "[prepare]") {
  CHECK_THROWS_AS(checkpoint({.prepare_ahead = -1}, wave, leaf({2})), c10::ValueError);
}

TEST_CASE("guide: a region is prepared before backward", "[prepare][readme]") {
  const Tensor x = leaf({8});
  const auto part = wave;
  const Counted done;
  const auto handle = std::make_shared<remat::RegionHandle>();
  const Tensor y = remat::checkpoint({.name = "first part", .handle = handle}, part, x);
  handle->prepare();   // recomputes now
  y.sum().backward();  // takes the tensors
  CHECK(done.now().recomputes == 1);
  require_bit_equal({x.grad()}, grad_of(wave(x), {x}));
}
