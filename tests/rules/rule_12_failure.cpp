// Rule 12: a failure in forward or recompute leaves nothing behind, and a retry gives equal
// gradients.

#include <ATen/record_function.h>

#include "tests/support/fault.h"
#include "tests/support/support.h"

namespace {

// ---- what user code throws

TEST_CASE("an exception of the function reaches the caller with its own type and text",
          "[rule-12]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({3});
  int64_t throws_on = 0;
  Calls calls;
  auto f = [&](const Tensor& t) {
    calls();
    const Tensor h = t.sin();
    if (calls.count() == throws_on) throw Fault("foo");
    return h.exp();
  };
  const Unchanged unchanged;
  SECTION("in the recompute") {
    throws_on = 2;
    const Tensor y = remat::checkpoint({.early_stop = early_stop}, f, x);
    const Unchanged with_graph;
    const Fault error = error_of<Fault>([&] { grad_of(y, {x}, {.retain_graph = true}); });
    CHECK(std::string(error.what()) == "foo");
    with_graph.require("after a throw in the recompute");
    require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
    CHECK(calls.count() == 3);
  }
  SECTION("in forward") {
    throws_on = 1;
    Counted done;
    const Fault error =
        error_of<Fault>([&] { remat::checkpoint({.early_stop = early_stop}, f, x); });
    CHECK(std::string(error.what()) == "foo");
    CHECK(done.now().frames_created == 1);
    CHECK(calls.count() == 1);
  }
  unchanged.require("at the end");
}

TEST_CASE("after an exception in a recompute the same backward gives bit-equal gradients",
          "[rule-12]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const Tensor x = leaf({100, 100});
  bool throws = false;
  auto inner = [&](const Tensor& t) {
    const Tensor h = at::dropout(t.sin(), 0.5, true).exp();
    if (throws) throw Fault("in the inner region");
    return h.tanh();
  };
  Counted done;
  const Tensor y = remat::checkpoint(
      {.early_stop = early_stop},
      [&](const Tensor& t) {
        const Tensor h = at::dropout(t.cos(), 0.5, true);
        return remat::checkpoint(inner, h).exp();
      },
      x);
  const Tensors expected = grad_of(y, {x}, {.retain_graph = true});
  CHECK(done.now().recomputes == 2);
  LiveBytes bytes;
  for (int i = 1; i <= 3; ++i) {
    throws = true;
    CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), Fault);
    CHECK(remat::counters().recomputed_bytes_alive == 0);
    CHECK(bytes.held() == 0);
    throws = false;
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), expected);
    CHECK(done.now().recomputes == 2 + 3 * i);  // one that threw, two that did not
    CHECK(bytes.held() == 0);
  }
}

TEST_CASE("a failed gradient leaves the next region and backward alone", "[rule-12]") {
  const Tensor x = leaf({3}), unrelated = leaf({3});
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin(); }, x);
  CHECK_THROWS_AS(grad_of(y, {unrelated}), c10::Error);
  CHECK_THROWS_AS(torch::autograd::grad({y}, {x}, {at::ones({7})}), c10::Error);
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return t.exp(); });
  require_same_grads([](const Tensor& t) { return t.exp(); },
                     [&](const Tensor& t) { return remat::checkpoint(f, t); }, x);
  CHECK(calls.count() == 2);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin(), {x}));
}

TEST_CASE("something thrown that is no std::exception ends as a CheckpointError in backward",
          "[rule-12]") {
  const Tensor x = leaf({3});
  int64_t throws_on = 0;
  Calls calls;
  auto f = [&](const Tensor& t) {
    calls();
    const Tensor h = t.sin();
    if (calls.count() == throws_on) throw 42;
    return h.exp();
  };
  throws_on = 1;
  CHECK_THROWS_AS(remat::checkpoint(f, x), int);
  CHECK(remat::counters().frames_alive == 0);
  throws_on = 3;
  const Tensor y = remat::checkpoint(f, x);
  const auto error =
      error_of<remat::CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
  CHECK(error.kind() == remat::CheckpointError::Kind::RecomputeFailed);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
}

/// An argument whose copies throw when told to.
struct Fragile {
  static inline int throws_in = -1;  ///< copies until one throws; negative: never
  Tensor tensor;
  explicit Fragile(Tensor t) : tensor(std::move(t)) {}
  Fragile(const Fragile& other) : tensor(other.tensor) {
    if (throws_in >= 0 && throws_in-- == 0) throw Fault("in a copy");
  }
  Fragile& operator=(const Fragile&) = default;
};
template <class Visitor>
void visit_tensors(Fragile& value, Visitor&& visit) {
  visit(value.tensor);
}

TEST_CASE("a throwing copy of an argument is a failure like any other", "[rule-12][rule-2]") {
  Fragile::throws_in = -1;
  const Tensor x = leaf({100});
  const Fragile argument(x);
  const std::unordered_map<int, Tensor> more{{1, x}, {2, x}};
  auto f = [](const Fragile& value, const std::unordered_map<int, Tensor>& map) {
    return value.tensor.sin() * map.at(1) * map.at(2);
  };
  const Tensors plain = grad_of(f(argument, more), {x});
  const Unchanged unchanged;
  for (int i = 0; i < 4; ++i) {
    Fragile::throws_in = i;
    Tensor y;
    try {
      y = remat::checkpoint(f, argument, more);
    } catch (const Fault&) {
    }
    Fragile::throws_in = -1;
    if (y.defined()) break;
    unchanged.require("after a copy threw in forward");
  }
  const Tensor y = remat::checkpoint(f, argument, more);
  const Unchanged with_graph;
  for (int i = 0; i < 4; ++i) {
    Fragile::throws_in = i;
    try {
      grad_of(y, {x}, {.retain_graph = true});
    } catch (const Fault&) {
    }
    Fragile::throws_in = -1;
    with_graph.require("after a copy threw in backward");
    require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  }
}

TEST_CASE("hooks of the user that throw on a region's input keep their type", "[rule-12]") {
  const Tensor x = leaf({3});
  bool pack_throws = false, unpack_throws = false;
  const remat::SavedTensorHooksGuard hooks(
      [&](const Tensor& t) {
        if (pack_throws) throw Fault("pack");
        return t.detach();
      },
      [&](const Tensor& t) {
        if (unpack_throws) throw Fault("unpack");
        return t;
      });
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return t.sin().exp(); });
  const int64_t frames = remat::counters().frames_alive;
  pack_throws = true;
  CHECK_THROWS_AS(remat::checkpoint(f, x), Fault);
  CHECK(remat::counters().frames_alive == frames);
  CHECK(calls.count() == 0);
  pack_throws = false;
  const Tensor y = remat::checkpoint(f, x);
  unpack_throws = true;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), Fault);
  CHECK(calls.count() == 1);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  unpack_throws = false;
  require_bit_equal(grad_of(y, {x}), {x.detach().sin().exp() * x.detach().cos()});
}

TEST_CASE("an unpack that throws no std::exception reaches the caller as one that does",
          "[rule-12][rule-16]") {
  const bool in_region = GENERATE(true, false);
  CAPTURE(in_region);
  const Tensor x = leaf({3});
  bool throws = true;
  Tensor y;
  {
    const remat::SavedTensorHooksGuard hooks([](const Tensor& t) { return t.detach(); },
                                             [&](const Tensor& t) {
                                               if (throws) throw 42;
                                               return t;
                                             });
    y = in_region ? remat::checkpoint([](const Tensor& t) { return t.sin(); }, x) : x.sin();
  }
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::exception);
  throws = false;
  require_bit_equal(grad_of(y, {x}), {x.detach().cos()});
}

TEST_CASE("a fingerprint that throws is a failure like any other", "[rule-12]") {
  const Tensor x = leaf({3});
  bool throws = false;
  const remat::CheckpointOptions options{.fingerprint = [&](const Tensor&) -> std::string {
    if (throws) throw Fault("fingerprint");
    return "fine";
  }};
  auto f = [](const Tensor& t) { return t.sin().exp().cos(); };
  const Unchanged unchanged;
  throws = true;
  CHECK_THROWS_AS(remat::checkpoint(options, f, x), Fault);
  unchanged.require("after a throw in forward");
  throws = false;
  const Tensor y = remat::checkpoint(options, f, x);
  const Unchanged with_graph;
  throws = true;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), Fault);
  with_graph.require("after a throw in the recompute");
  throws = false;
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().cos(), {x}));
}

// ---- user scopes

TEST_CASE("each pass enters its scope once and leaves it on every path", "[rule-12]") {
  const bool early_stop = GENERATE(true, false);
  const bool nested = GENERATE(true, false);
  CAPTURE(early_stop, nested);
  const Tensor x = leaf({50000});
  Calls made, entered_forward, entered_recompute;
  int64_t inside = 0, most_inside = 0;
  auto scope = [&](Calls& entered) {
    return [&]() -> remat::Scope {
      entered();
      most_inside = std::max(most_inside, ++inside);
      return std::shared_ptr<void>(nullptr, [&](void*) { --inside; });
    };
  };
  remat::CheckpointOptions options;
  options.early_stop = early_stop;
  options.context_fn = [&] {
    made();
    return remat::ContextPair{scope(entered_forward), scope(entered_recompute)};
  };
  bool throws = false;
  std::vector<int64_t> seen_inside;
  auto f = [&](const Tensor& t) {
    seen_inside.push_back(inside);
    const Tensor h = t.sin();
    if (throws) throw Fault("inside the scope");
    return h.exp().exp();
  };
  auto run = [&] {
    return nested ? remat::checkpoint(
                        [&](const Tensor& t) { return remat::checkpoint(options, f, t); }, x)
                  : remat::checkpoint(options, f, x);
  };
  throws = true;
  CHECK_THROWS_AS(run(), Fault);
  CHECK(inside == 0);
  throws = false;
  const Tensor y = run();
  CHECK(inside == 0);
  CHECK(made.count() == 2);
  CHECK(entered_forward.count() == 2);
  CHECK(entered_recompute.count() == 0);
  throws = true;
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), Fault);
  CHECK(inside == 0);
  throws = false;
  const int64_t recomputes = entered_recompute.count(), forwards = entered_forward.count();
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp().exp(), {x}));
  CHECK(inside == 0);
  CHECK(most_inside == 1);
  CHECK(entered_recompute.count() == recomputes + 1);
  // The parent's recompute ends at the inner region's input.
  CHECK(entered_forward.count() == forwards);
  for (const int64_t each : seen_inside) CHECK(each == 1);
}

TEST_CASE("a scope that fails to open is a failure like any other", "[rule-12]") {
  const Tensor x = leaf({3});
  std::string fails;
  remat::CheckpointOptions options;
  options.context_fn = [&] {
    if (fails == "context_fn") throw Fault(fails);
    auto scope = [&fails](std::string pass) {
      return [&fails, pass]() -> remat::Scope {
        if (fails == pass) throw Fault(pass);
        return nullptr;
      };
    };
    return remat::ContextPair{scope("forward"), scope("recompute")};
  };
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) { return t.sin().exp(); });
  const Unchanged unchanged;
  for (const char* each : {"context_fn", "forward"}) {
    fails = each;
    CHECK_THROWS_WITH(remat::checkpoint(options, f, x), contains(each));
    unchanged.require(each);
  }
  CHECK(calls.count() == 0);
  fails = "";
  const Tensor y = remat::checkpoint(options, f, x);
  const Unchanged with_graph;
  fails = "recompute";
  CHECK_THROWS_WITH(grad_of(y, {x}, {.retain_graph = true}), contains("recompute"));
  with_graph.require("recompute");
  CHECK(calls.count() == 1);
  fails = "";
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().exp(), {x}));
}

/// Logs the operators of its thread while it lives.
class OperatorLog {
 public:
  explicit OperatorLog(std::vector<std::string>& names) {
    current_ = &names;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& call)
                                       -> std::unique_ptr<at::ObserverContext> {
          current_->push_back(call.name());
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorLog() { at::removeCallback(handle_); }

 private:
  static inline std::vector<std::string>* current_ = nullptr;
  at::CallbackHandle handle_;
};

TEST_CASE("operator loggers as scopes see the operator once in each pass", "[rule-12]") {
  std::vector<std::string> forward, recompute;
  remat::CheckpointOptions options;
  options.context_fn = [&] {
    return remat::ContextPair{[&] { return std::make_shared<OperatorLog>(forward); },
                              [&] { return std::make_shared<OperatorLog>(recompute); }};
  };
  const Tensor x = leaf({});
  const Tensor y = remat::checkpoint(options, [](const Tensor& t) { return t.exp(); }, x);
  CHECK(forward == std::vector<std::string>{"aten::exp"});
  CHECK(recompute.empty());
  require_bit_equal(grad_of(y, {x}), grad_of(x.exp(), {x}));
  CHECK(forward == std::vector<std::string>{"aten::exp"});
  std::erase(recompute, "aten::detach");
  CHECK(recompute == std::vector<std::string>{"aten::exp"});
}

// ---- mismatches are failures too

TEST_CASE("after a mismatch nothing is left, and a well-behaved recompute works",
          "[rule-12][rule-10]") {
  const Tensor x = leaf({100});
  enum class How { Fewer, More, Metadata, Capture };
  const How how = GENERATE(How::Fewer, How::More, How::Metadata, How::Capture);
  CAPTURE(static_cast<int>(how));
  bool deviate = false;
  Tensor captured = at::ones({100});
  const Tensor kept = captured;
  auto f = [&](const Tensor& t) {
    const Tensor h = (t.sin() * captured).exp();
    if (!deviate) return h.tanh();
    if (how == How::Fewer) return h.clone();
    if (how == How::More) return h.tanh().sin();
    if (how == How::Metadata) return (h * at::ones({2, 1})).tanh();
    return h.tanh();
  };
  const Tensor y = remat::checkpoint({.early_stop = how != How::More}, f, x);
  const Tensors expected = grad_of(y, {x}, {.retain_graph = true});
  const Unchanged unchanged;
  LiveBytes bytes;
  deviate = true;
  if (how == How::Capture) captured = at::ones({100});
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), remat::CheckpointError);
  deviate = false;
  captured = kept;
  unchanged.require("after a mismatch");
  CHECK(bytes.held() == 0);
  require_bit_equal(grad_of(y, {x}), expected);
}

}  // namespace
