// The interface on which a binding of another language relies: remat/binding.h.

#include "remat/binding.h"

#include <c10/core/DispatchKey.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "remat/plan.h"
#include "tests/support/files.h"
#include "tests/support/nn.h"

namespace {

using remat::CheckpointError;
using remat::CheckpointOptions;

/// How a language without C++ exceptions of remat's might end a function.
struct ForeignStop {};

/// Its form of an error.
struct ForeignError : std::runtime_error {
  ForeignError(CheckpointError::Kind what_kind, const std::string& text)
      : std::runtime_error(text), kind(what_kind) {}
  CheckpointError::Kind kind;
};

/// The calls that a binding sees of one region.
struct Seen {
  bool can_be_stopped = true;
  bool stops_soon = false, stops_at_regions = false;  // what it answers
  std::atomic<int> asked_soon{0}, asked_at_regions{0};
  std::atomic<int> runs{0}, ends{0}, stops{0}, raises{0};
  std::atomic<int> stops_inside{0}, default_signals{0}, errors_inside{0};
};

using Function = std::function<Tensor(const Tensor&)>;

/// A function of another language with one tensor argument.
class ForeignBody final : public remat::RegionBody {
 public:
  ForeignBody(Function function, Tensor argument, Seen& seen)
      : function_(std::move(function)), argument_(std::move(argument)), seen_(seen) {}
  void visit_inputs(remat::TensorVisitor visitor) override { visitor(argument_); }
  void run_again(std::vector<Tensor>& inputs) override {
    ++seen_.runs;
    is_inside_ = true;
    try {
      function_(inputs[0]);
      ++seen_.ends;
    } catch (const ForeignStop&) {
      is_inside_ = false;
      throw;
    } catch (const remat::StopSignal&) {
      ++seen_.default_signals;
      is_inside_ = false;
      throw;
    } catch (...) {
      ++seen_.errors_inside;
      is_inside_ = false;
      throw;
    }
    is_inside_ = false;
  }
  bool can_be_stopped() const override { return seen_.can_be_stopped; }
  [[noreturn]] void stop() override {
    ++seen_.stops;
    if (is_inside_) ++seen_.stops_inside;
    throw ForeignStop{};
  }
  bool stop_soon() override {
    ++seen_.asked_soon;
    is_ending_ = seen_.stops_soon;
    return is_ending_;
  }
  bool stop_at_region() override {
    ++seen_.asked_at_regions;
    return seen_.stops_at_regions;
  }
  /// The language's boundary: an operator has returned to it.
  static void operator_returned() {
    if (std::exchange(is_ending_, false)) throw ForeignStop{};
  }
  [[noreturn]] void raise(CheckpointError error) override {
    ++seen_.raises;
    at::ones({2}).sin();  // as any code of another language may
    throw ForeignError(error.kind(), error.what_without_backtrace());
  }

 private:
  const Function function_;
  Tensor argument_;
  Seen& seen_;
  inline static thread_local bool is_inside_ = false;
  inline static thread_local bool is_ending_ = false;
};

Tensor foreign_region(Seen& seen, const CheckpointOptions& options, const Function& function,
                      const Tensor& x) {
  if (!remat::opens_region()) return function(x);
  remat::ForwardRun run(options, std::make_unique<ForeignBody>(function, x, seen));
  Tensor y = function(x);
  run.finish([&](remat::TensorVisitor visitor) { visitor(y); });
  return y;
}

Tensor foreign_region(Seen& seen, const remat::FunctionFacts& facts,
                      const CheckpointOptions& options, const Function& function, const Tensor& x) {
  remat::ForwardRun run(options, std::make_unique<ForeignBody>(function, x, seen), facts);
  if (run.has_ended()) throw ForeignStop{};
  Tensor y = function(x);
  run.finish([&](remat::TensorVisitor visitor) { visitor(y); });
  return y;
}

constexpr int64_t large = 1 << 14;

/// A gradient inside, of which the function needs nothing later.
Tensor with_gradient_inside(const Tensor& t) {
  const Tensor own = t.detach().requires_grad_();
  const Tensor y = t.sin().cos();
  const Tensor slope = torch::autograd::grad({own.sin().sum()}, {own})[0];
  return y * slope.sum();
}

}  // namespace

TEST_CASE("a foreign function runs as a region, and is ended in its own way", "[binding][rule-5]") {
  const Tensor x = leaf({large});
  const Function f = [](const Tensor& t) { return t.sin().cos().exp() + 1; };
  Seen seen;
  const LiveBytes bytes;
  const Tensor y = foreign_region(seen, {}, f, x);
  CHECK(bytes.held() == 4 * large);  // the result; nothing from inside
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
  CHECK(seen.runs == 1);
  CHECK(seen.stops == 1);
  CHECK(seen.ends == 0);
  CHECK(seen.default_signals == 0);
  CHECK(seen.raises == 0);
}

TEST_CASE("a recompute ends where the function's facts want it, also where that skips little",
          "[binding][rule-5]") {
  const Tensor x = leaf({4});
  const Function f = [](const Tensor& t) { return t.sin().exp(); };
  const bool always_stops = GENERATE(false, true);
  Seen seen;
  const Tensor y = foreign_region(seen, {.always_stops = always_stops}, CheckpointOptions(), f, x);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
  CHECK(seen.stops == (always_stops ? 1 : 0));
  CHECK(seen.ends == (always_stops ? 0 : 1));
}

TEST_CASE("a recompute may end when its last operator has returned, if that has little left to do",
          "[binding][rule-5]") {
  int late = 0;
  const Function f = [&](const Tensor& t) {
    Tensor y = t.sin();
    ForeignBody::operator_returned();
    y = y.exp();
    ForeignBody::operator_returned();
    ++late;
    return y + 1;  // a node after the last tensor
  };
  const int64_t size = GENERATE(4, large);
  const bool has_policy = GENERATE(false, true);
  CheckpointOptions options;
  if (has_policy) options.policy = remat::save_ops({"aten::cos"});
  const Tensor x = leaf({size});
  Seen seen;
  SECTION("it answers that it will") { seen.stops_soon = true; }
  SECTION("it answers that it will not") {}
  const Tensor y = foreign_region(seen, {.always_stops = true}, options, f, x);
  const remat::Counters before = remat::counters();
  const std::vector<Tensor> gradient = grad_of(y, {x});
  CHECK(remat::counters().early_stops - before.early_stops == 1);
  require_bit_equal(gradient, grad_of(f(x), {x}));
  CHECK(seen.asked_soon == (size == large ? 0 : 1));
  CHECK(seen.stops == (size == large || !seen.stops_soon ? 1 : 0));
  CHECK(seen.ends == 0);
  CHECK(late == 2);  // forward, and plain
}

TEST_CASE("a stop is not put off where forward went on to save", "[binding][rule-5]") {
  const Tensor x = leaf({4});
  Seen seen;
  seen.stops_soon = true;
  const Function f = [](const Tensor& t) {
    Tensor y = t.sin();
    ForeignBody::operator_returned();
    t.cos();  // its node is gone when backward comes
    return y;
  };
  require_bit_equal(grad_of(foreign_region(seen, {}, f, x), {x}), grad_of(f(x), {x}));
  CHECK(seen.asked_soon == 0);
  CHECK(seen.stops == 1);
}

TEST_CASE("what goes on after it was asked to end fills nothing, and no backward runs in it",
          "[binding][rule-5][rule-6]") {
  const Tensor x = leaf({4});
  Seen seen;
  seen.stops_soon = true;
  int backwards = 0;
  const Function f = [&](const Tensor& t) {
    const Tensor y = t.sin().exp();  // nothing looks whether it is to end
    if (remat::is_recomputing()) {
      y.sin().exp();
      torch::autograd::grad({t.detach().requires_grad_().sin().sum()}, {t});
      ++backwards;
    }
    return y + 1;
  };
  const Tensor y = foreign_region(seen, {}, f, x);
  require_bit_equal(grad_of(y, {x}), {(x.sin().exp() * x.cos()).detach()});
  CHECK(seen.asked_soon == 1);
  CHECK(seen.stops == 1);  // before the backward
  CHECK(backwards == 0);
}

TEST_CASE("who begins a region where a recompute ends is told so, and nothing is thrown",
          "[binding][rule-5]") {
  const bool sees_end = GENERATE(false, true);
  const bool answers = GENERATE(false, true);
  const Tensor x = leaf({large});
  Seen inner, outer;
  outer.stops_at_regions = answers;
  const Function sine = [](const Tensor& t) { return t.sin().cos(); };
  const Function f = [&](const Tensor& t) {
    return foreign_region(inner, {.sees_end = sees_end}, CheckpointOptions(), sine, t.exp());
  };
  const int64_t alive = remat::counters().frames_alive;
  const Tensor y = foreign_region(outer, {}, f, x);
  require_bit_equal(grad_of(y, {x}), grad_of(sine(x.exp()), {x}));
  CHECK(outer.asked_at_regions == (sees_end ? 1 : 0));
  CHECK(outer.stops == (sees_end && answers ? 0 : 1));
  CHECK(inner.runs == 1);
  CHECK(inner.asked_at_regions == 0);
  CHECK(remat::counters().frames_alive == alive);
  CHECK(!remat::is_recomputing());
}

TEST_CASE("a binding can tell which library it runs with", "[binding]") {
  CHECK(remat::loaded_binding_abi() == remat::binding_abi);
}

TEST_CASE("without grad mode a binding runs its function as it is", "[binding]") {
  const at::NoGradGuard no_grad;
  CHECK_FALSE(remat::opens_region());
}

TEST_CASE("every place that ends a recompute asks the binding", "[binding][rule-5]") {
  const Tensor x = leaf({large});
  Seen seen;
  SECTION("once, where the function has caught it and goes on") {
    const Function f = [](const Tensor& t) {
      try {
        return t.sin().cos();
      } catch (...) {
        return t.exp().tanh().sigmoid();
      }
    };
    const Tensor y = foreign_region(seen, {}, f, x);
    require_bit_equal(grad_of(y, {x}), grad_of(x.sin().cos(), {x}));
    CHECK(seen.stops == 1);
  }
  SECTION("where more tensors come than in forward") {
    bool is_forward = true;
    const Function f = [&](const Tensor& t) {
      const Tensor y = t.sin();
      return is_forward ? y : y.exp().cos().exp();
    };
    const Tensor y = foreign_region(seen, {.early_stop = false}, f, x);
    is_forward = false;
    const auto error = error_of<ForeignError>([&] { grad_of(y, {x}); });
    CHECK(error.kind == CheckpointError::Kind::MoreTensors);
    CHECK(seen.stops == 1);
    CHECK(seen.raises == 1);
    CHECK(seen.errors_inside == 0);
  }
  SECTION("where the function begins a backward that nobody needs any more") {
    const Function f = [](const Tensor& t) {
      const Tensor y = t.sin();
      const Tensor own = at::ones({2}).requires_grad_();
      own.sum().backward();
      return y;
    };
    // The result of `sum` saves nothing, so the stop is due at the backward.
    const Tensor y = foreign_region(seen, {}, f, x);
    require_bit_equal(grad_of(y, {x}), grad_of(x.sin(), {x}));
    CHECK(seen.stops == 1);
  }
  SECTION("where forward waits for a backward inside") {
    const Function f = [](const Tensor& t) {
      const Tensor own = t.detach().requires_grad_();
      const Tensor y = own.sin().exp();
      const Tensor slope = torch::autograd::grad({y.sum()}, {own})[0];
      return t.cos() * slope;
    };
    const Tensor y = foreign_region(seen, {.early_stop = false}, f, x);
    CHECK(seen.stops == 1);  // what forward has not run yet is not run by the recompute
    require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
  }
  CHECK(seen.default_signals == 0);
}

TEST_CASE("nothing is thrown into a function that says that nothing may be", "[binding][rule-5]") {
  const Tensor x = leaf({large});
  Seen seen;
  seen.can_be_stopped = false;
  SECTION("after the last tensor needed") {
    const remat::EarlyStopGuard early_stop(true);
    const Function f = [](const Tensor& t) { return t.sin().cos().exp() + 1; };
    const Tensor y = foreign_region(seen, {}, f, x);
    require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
    CHECK(seen.ends == 1);
  }
  SECTION("with more tensors than in forward") {
    bool is_forward = true;
    const Function f = [&](const Tensor& t) { return is_forward ? t.sin() : t.sin().exp().cos(); };
    const Tensor y = foreign_region(seen, {.early_stop = false}, f, x);
    is_forward = false;
    const auto error = error_of<ForeignError>([&] { grad_of(y, {x}); });
    CHECK(error.kind == CheckpointError::Kind::MoreTensors);
    CHECK(seen.ends == 1);
  }
  SECTION("with a backward inside, that forward waits for") {
    const Tensor y = foreign_region(seen, {}, with_gradient_inside, x);
    require_bit_equal(grad_of(y, {x}), grad_of(with_gradient_inside(x), {x}));
    CHECK(seen.ends == seen.runs);
  }
  SECTION("with a policy whose kept results are asked for by other calls") {
    const remat::Policy keep_all(
        [](const remat::PolicyContext&) { return remat::CheckpointPolicy::MustSave; });
    bool is_forward = true;
    const Function f = [&](const Tensor& t) { return is_forward ? (t * 2).sin() : (t * 3).sin(); };
    const Tensor y = foreign_region(seen, {.policy = keep_all}, f, x);
    is_forward = false;
    const auto error = error_of<ForeignError>([&] { grad_of(y, {x}); });
    CHECK(error.kind == CheckpointError::Kind::SelectiveMismatch);
    CHECK(seen.ends == 1);
  }
  SECTION("with a pin that forward did not make") {
    bool is_forward = true;
    const Function f = [&](const Tensor& t) {
      const Tensor y = remat::pin(t.sin());
      return (is_forward ? y : remat::pin(y)).cos();
    };
    const Tensor y = foreign_region(seen, {}, f, x);
    is_forward = false;
    const auto error = error_of<ForeignError>([&] { grad_of(y, {x}); });
    CHECK(error.kind == CheckpointError::Kind::SelectiveMismatch);
    CHECK(seen.ends == 1);
  }
  CHECK(seen.stops_inside == 0);
  CHECK(seen.errors_inside == 0);
  CHECK(seen.default_signals == 0);
}

TEST_CASE("a binding raises errors in its own form, and the region can be tried again",
          "[binding][rule-12]") {
  const Tensor x = leaf({4}), w = leaf({4});
  Seen seen;
  const Function f = [&](const Tensor& t) { return (t * w).sin(); };
  const Tensor plain = grad_of(f(x), {x})[0];
  const Tensor y = foreign_region(seen, {.name = "mine"}, f, x);
  {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  const auto error = error_of<ForeignError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
  CHECK(error.kind == CheckpointError::Kind::CaptureChanged);
  CHECK_THAT(std::string(error.what()), contains("mine"));
  CHECK(seen.raises == 1);
}

TEST_CASE("a wait for another thread lets go of what the binding holds", "[binding][rule-7]") {
  struct Callbacks final : remat::WaitCallbacks {
    std::atomic<int> num_let_go{0}, num_back{0};
    std::shared_ptr<void> let_go() noexcept override {
      ++num_let_go;
      return {nullptr, [this](void*) { ++num_back; }};
    }
  } callbacks;
  remat::set_wait_callbacks(&callbacks);
  // Two reads of one region in one backward: the second thread waits for the first one's recompute.
  // A module's buffers, as any state provider, are free for one recompute at a time.
  struct Slow final : remat::StateProvider {
    std::any capture() override { return 0; }
    void restore(const std::any&) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
  };
  const auto provider = std::make_shared<Slow>();
  const auto one = [&] {
    const Tensor x = leaf({4});
    Tensor y;
    {
      const remat::StateProviderGuard guard(provider);
      y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);
    }
    grad_of(y, {x});
  };
  std::thread first(one), second(one);
  first.join();
  second.join();
  remat::set_wait_callbacks(nullptr);
  CHECK(callbacks.num_let_go >= 1);
  CHECK(callbacks.num_back == callbacks.num_let_go);
}

TEST_CASE("a backward of another engine is seen where it is marked", "[binding][rule-6]") {
  const Tensor x = leaf({4});
  const Tensor above = x.exp();  // the argument's history
  Calls calls;
  const auto marked = [&](bool is_marked) {
    return [&calls, is_marked, &x](const Tensor& t) {
      calls();
      const Tensor y = t.sin();
      const torch::autograd::edge_list roots{torch::autograd::impl::gradient_edge(y)};
      const torch::autograd::edge_list targets{torch::autograd::impl::gradient_edge(x)};
      if (is_marked) {
        remat::BackwardMark mark(roots, targets, /*accumulates=*/false);
        mark.finish({}, {});
      }
      return y.cos();
    };
  };
  // A backward that goes on through the history of an argument cannot be repeated.
  const Tensor y = remat::checkpoint(marked(true), above);
  const auto error = error_of<CheckpointError>([&] { grad_of(y, {x}); });
  CHECK(error.kind() == CheckpointError::Kind::Unsupported);
  const Tensor unmarked = remat::checkpoint(marked(false), above);
  require_bit_equal(grad_of(unmarked, {x}), grad_of(x.exp().sin().cos(), {x}));
  CHECK(calls.count() == 4);
}

TEST_CASE("a run and a mark are finished once", "[binding]") {
  const Tensor x = leaf({4});
  Seen seen;
  const Function function = [](const Tensor& t) { return t.sin().exp(); };
  Tensor y;
  {
    remat::ForwardRun run({}, std::make_unique<ForeignBody>(function, x, seen));
    y = function(x);
    const auto visit = [&](remat::TensorVisitor visitor) { visitor(y); };
    run.finish(visit);
    CHECK_THAT(text_of(error_of<c10::ValueError>([&] { run.finish(visit); })),
               contains("finish was called on a run that had ended"));
  }
  require_bit_equal(grad_of(y, {x}), grad_of(function(x), {x}));
  remat::BackwardMark mark({}, {}, /*accumulates=*/false);
  mark.finish({}, {});
  CHECK_THAT(text_of(error_of<c10::ValueError>([&] { mark.finish({}, {}); })),
             contains("finish was called twice"));
}

TEST_CASE("a body that returns from raise is told so, by a text to report", "[binding][rule-10]") {
  class Returning final : public remat::RegionBody {
   public:
    explicit Returning(Tensor argument) : argument_(std::move(argument)) {}
    void visit_inputs(remat::TensorVisitor visitor) override { visitor(argument_); }
    void run_again(std::vector<Tensor>& inputs) override { inputs[0].narrow(0, 0, 2).exp(); }
    bool can_be_stopped() const override { return true; }
    void raise(CheckpointError) override {}

   private:
    Tensor argument_;
  };
  const Tensor x = leaf({3});
  Tensor y;
  {
    remat::ForwardRun run({}, std::make_unique<Returning>(x));
    y = x.exp();
    run.finish([&](remat::TensorVisitor visitor) { visitor(y); });
  }
  const std::string text = error_of<c10::Error>([&] { grad_of(y, {x}); }).what_without_backtrace();
  CHECK_THAT(text, contains("remat " REMAT_VERSION ": internal check failed: "));
  CHECK_THAT(text, contains("mismatch.cpp:"));
  CHECK_THAT(text, contains("a RegionBody returned from raise()"));
  CHECK_THAT(text, contains("This is a bug in remat. Please report it with this text"));
}

TEST_CASE("a binding runs the items of a plan, and what they save moves", "[binding][plan]") {
  const Folder folder;
  const Tensor x = leaf({large});
  const std::vector<Function> functions{[](const Tensor& t) { return t.sin().cos(); },
                                        [](const Tensor& t) { return t.exp().tanh(); },
                                        [](const Tensor& t) { return t.cos().exp(); },
                                        [](const Tensor& t) { return t.square().sum(); }};
  Tensor plain = x;
  for (const Function& each : functions) plain = each(plain);
  const Tensor expected = grad_of(plain, {x})[0];
  plain.reset();
  const remat::Plan plan = remat::Plan::parse("[mv[1] mv[ck[2 3]] 4]");
  Seen seen;
  std::vector<std::size_t> items;
  const auto run_item = [&](std::size_t item, Tensor t) {
    items.push_back(item);
    if (item == 1) {
      const Function both = [&](const Tensor& u) { return functions[2](functions[1](u)); };
      return foreign_region(seen, {}, both, t);
    }
    return functions[item == 0 ? 0 : 3](t);
  };
  const LiveBytes bytes;
  const remat::MoveOptions moving{.directory = folder.path(), .min_bytes = 0};
  const Tensor loss = remat::run_items(plan, x, moving, run_item);
  CHECK(items == std::vector<std::size_t>{0, 1, 2});
  CHECK(bytes.held() == 4 * large + 4);  // what the last one saved, and the loss
  require_bit_equal(grad_of(loss, {x}), {expected});
  CHECK(seen.runs == 1);

  const auto throws = [](std::size_t item, Tensor t) -> Tensor {
    if (item == 1) throw ForeignStop{};
    return t.sin().cos();
  };
  CHECK_THROWS_AS(remat::run_items(plan, x, moving, throws), ForeignStop);
  CHECK_THAT(text_of(error_of<c10::ValueError>([&] { remat::run_items(plan, x, {}, run_item); })),
             contains("the plan moves tensors of the CPU, but MoveOptions has no directory"));
  CHECK(bit_equal(grad_of(remat::run_items(remat::Plan(3), x, {}, run_item), {x})[0], expected));
}

TEST_CASE("errors call tensors what a module that stands for others says", "[binding][rule-10]") {
  struct StandIn : torch::nn::Module, remat::TensorNames {
    explicit StandIn(Tensor stands_for) : tensor(std::move(stands_for)) {
      register_buffer("0", at::ones({4}));
    }
    void visit_tensors(Visitor visitor) const override {
      visitor("parameter 'other' of Block", at::ones({4}));
      visitor("parameter 'conv1.weight' of Block", tensor);
      visitor("parameter 'missing' of Block", Tensor());
    }
    Tensor tensor;
  };
  const Tensor x = leaf({4}), weight = leaf({4});
  const auto stand_in = std::make_shared<StandIn>(weight);
  const Tensor buffer = stand_in->buffers()[0];
  const auto changed = [&](const Tensor& tensor) {
    const Tensor y = remat::checkpoint(
        {.modules = {stand_in}}, [&](const Tensor& t) { return (t * weight).sin() * buffer; }, x);
    {
      const at::NoGradGuard no_grad;
      tensor.add_(1);
    }
    return text_of(error_of<CheckpointError>([&] { y.sum().backward(); }));
  };
  CHECK_THAT(changed(weight), contains("parameter 'conv1.weight' of Block (saved tensor at"));
  CHECK_THAT(changed(buffer), !contains("StandIn"));
}
