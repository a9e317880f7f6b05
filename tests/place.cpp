// Places of a program's own: what they are asked, when, on what, and what their errors do.

#include "remat/place.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function_hook.h>

#include <chrono>
#include <limits>
#include <mutex>
#include <thread>

#include "remat/binding.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/sizes.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::SaveElsewhereGuard;
using remat::SaveElsewhereOptions;
using torch::autograd::SavedVariable;

namespace {

/// The orders to a place, and the calls that it got.
struct Script {
  bool stores_bytes = true, is_late = false;
  std::function<bool(const Tensor&)> takes = [](const Tensor&) { return true; };
  /// Instead of keeping `flat`: false, null is returned.
  std::function<bool(int, const Tensor&)> on_begin_store = [](int, const Tensor&) { return true; };
  std::function<void(int)> on_finish_store = [](int) {};
  std::function<void(int)> on_begin_load = [](int) {};
  std::function<Tensor(int, Tensor)> on_finish_load = [](int, const Tensor& t) {
    return t.clone();
  };
  Alive places, contents;
  std::atomic<int> num_stored{0}, num_at_once{0};

  void add(const std::string& event, int number) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!log.empty()) log += ", ";
    log += event + " " + std::to_string(number);
  }
  /// Since it was last asked.
  std::string events() {
    const std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(log, {});
  }

 private:
  std::mutex mutex;
  std::string log;
};

class Kept final : public remat::StoredContents {
 public:
  Kept(std::shared_ptr<Script> script, int number, const Tensor& flat)
      : script_(std::move(script)),
        number_(number),
        probe_(script_->contents.probe()),
        held_(script_->is_late ? flat : flat.clone()) {}
  ~Kept() override { script_->add("drop", number_); }
  bool is_stored_late() const override { return script_->is_late; }
  void finish_store() override {
    const Alone alone(*this);
    script_->add("finish_store", number_);
    script_->on_finish_store(number_);
    held_ = held_.clone();
  }
  void begin_load() override {
    const Alone alone(*this);
    script_->add("begin_load", number_);
    script_->on_begin_load(number_);
  }
  Tensor finish_load() override {
    const Alone alone(*this);
    script_->add("finish_load", number_);
    return script_->on_finish_load(number_, held_);
  }
  void cancel_load() override {
    const Alone alone(*this);
    script_->add("cancel_load", number_);
  }

 private:
  /// Counts calls that overlap.
  struct Alone {
    explicit Alone(Kept& kept) : kept(kept) {
      if (kept.is_called_.exchange(true)) ++kept.script_->num_at_once;
    }
    ~Alone() { kept.is_called_ = false; }
    Kept& kept;
  };
  const std::shared_ptr<Script> script_;
  const int number_;
  const Alive::Probe probe_;
  Tensor held_;
  std::atomic<bool> is_called_{false};
};

class Keeper final : public remat::Place {
 public:
  explicit Keeper(std::shared_ptr<Script> script)
      : script_(std::move(script)), probe_(script_->places.probe()) {}
  bool takes(const Tensor& tensor) const override { return script_->takes(tensor); }
  bool stores_bytes() const override { return script_->stores_bytes; }
  std::shared_ptr<remat::StoredContents> begin_store(const Tensor& flat) override {
    const int number = ++script_->num_stored;
    script_->add("begin_store", number);
    if (!script_->on_begin_store(number, flat)) return nullptr;
    return std::make_shared<Kept>(script_, number, flat);
  }

 private:
  const std::shared_ptr<Script> script_;
  const Alive::Probe probe_;
};

std::unique_ptr<SaveElsewhereGuard> guard_of(const std::shared_ptr<Script>& script,
                                             SaveElsewhereOptions options = {}) {
  return std::make_unique<SaveElsewhereGuard>(std::make_unique<Keeper>(script), options);
}

/// Three tensors are saved that can be moved.
Tensor chain(const Tensor& x) { return (x + 1).sin().cos().sin(); }
Tensor chain_under(const std::shared_ptr<Script>& script, const Tensor& x,
                   SaveElsewhereOptions options = {}) {
  const auto guard = guard_of(script, options);
  return chain(x);
}

}  // namespace

// ---- what a place sees, and what comes back

TEST_CASE("a place gets flat bytes, or elements if it wants them", "[place]") {
  const auto script = std::make_shared<Script>();
  script->stores_bytes = GENERATE(true, false);
  script->on_begin_store = [&](int, const Tensor& flat) {
    CHECK(flat.dim() == 1);
    CHECK(flat.is_contiguous());
    CHECK_FALSE(flat.requires_grad());
    CHECK(flat.scalar_type() == (script->stores_bytes ? at::kByte : at::kDouble));
    CHECK(bytes_of(flat) == 6 * 5 * 8);
    return true;
  };
  const Tensor x = leaf({6, 5}, at::kDouble);
  const auto f = [](const Tensor& t) { return ((t + 1).t().sin() * (t + 2).t().exp()).tanh(); };
  require_same_grads(
      f,
      [&](const Tensor& t) {
        const auto guard = guard_of(script);
        return f(t);
      },
      x);
  CHECK(script->num_stored > 3);
}

TEST_CASE("what waits in a place is gone from memory, and leaves the place with the graph",
          "[place]") {
  const auto script = std::make_shared<Script>();
  const Tensor x = leaf({500});
  const LiveBytes bytes;
  {
    const Tensor y = chain_under(script, x);
    CHECK(bytes.held() == bytes_of(y) + 3 * bytes_of(x));  // the place's own copies
    CHECK(script->contents.count() == 3);
    CHECK(script->places.count() == 1);  // the guard is gone; the contents need it
    require_bit_equal(grad_of(y, {x}), grad_of(chain(x), {x}));
    CHECK(script->contents.count() == 0);
    CHECK(script->places.count() == 0);
  }
  CHECK(bytes.held() == 0);
}

TEST_CASE("a storage goes to a place once for all its views", "[place]") {
  const auto script = std::make_shared<Script>();
  const Tensor x = leaf({8, 9});
  const auto f = [](const Tensor& t) {
    const Tensor h = t + 1;
    return h.chunk(3, 1)[0] * h.chunk(3, 1)[2] + h.view({-1}).dot(h.reshape({-1}));
  };
  Tensor y;
  {
    const auto guard = guard_of(script);
    y = f(x);
  }
  CHECK(script->num_stored == 1);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
}

TEST_CASE("a place may leave tensors where they are", "[place]") {
  const auto script = std::make_shared<Script>();
  const bool at_once = GENERATE(true, false);
  if (at_once)
    script->takes = [](const Tensor&) { return false; };
  else
    script->on_begin_store = [](int, const Tensor&) { return false; };
  const Tensor x = leaf({16});
  const LiveBytes bytes;
  const Tensor y = chain_under(script, x);
  CHECK(bytes.held() == 4 * bytes_of(x));
  CHECK(script->num_stored == (at_once ? 0 : 3));
  require_bit_equal(grad_of(y, {x}), grad_of(chain(x), {x}));
}

TEST_CASE("a place to which nothing went ends with its guard", "[place]") {
  const auto script = std::make_shared<Script>();
  script->takes = [](const Tensor&) { return false; };
  const Tensor x = leaf({64});
  const Tensor y = chain_under(script, x);
  CHECK(script->places.count() == 0);
  CHECK(bit_equal(grad_of(y, {x})[0], grad_of(chain(x), {x})[0]));
}

TEST_CASE("options of a place: small tensors and parameters stay, nonsense is refused", "[place]") {
  const auto script = std::make_shared<Script>();
  const Tensor x = leaf({16});
  chain_under(script, x, {.min_bytes = 65});
  CHECK(script->num_stored == 0);
  chain_under(script, x, {.min_bytes = 64});
  CHECK(script->num_stored == 3);
  {
    const auto guard = guard_of(script, {.skip_parameters = false});
    const Tensor y = x.sin();
    CHECK(script->num_stored == 4);
  }
  CHECK_THROWS_AS(SaveElsewhereGuard(nullptr), c10::ValueError);
  CHECK_THROWS_WITH(SaveElsewhereGuard(nullptr), contains("std::make_unique<YourPlace>()"));
  for (const SaveElsewhereOptions& wrong :
       {SaveElsewhereOptions{.min_bytes = -1}, SaveElsewhereOptions{.prefetch_depth = -1},
        SaveElsewhereOptions{.max_bytes_in_flight = -1}})
    CHECK_THROWS_AS(guard_of(script, wrong), c10::ValueError);
  CHECK_THROWS_WITH(guard_of(script, {.prefetch_depth = -2}), contains("prefetch_depth is -2"));
}

TEST_CASE("a place that hands out what it holds is not written to by backward", "[place]") {
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
  const auto script = std::make_shared<Script>();
  // Whole, or a part of something larger.
  const bool is_part = GENERATE(false, true);
  script->on_finish_load = [=](int, const Tensor& held) {
    return is_part ? at::cat({held, held}).slice(0, held.numel()) : held;
  };
  const Tensor x = leaf({64});
  Tensor y;
  {
    const auto guard = guard_of(script);
    y = Scribbles::apply(x + 1);
  }
  const Tensor first = grad_of(y, {x}, {.retain_graph = true})[0];
  require_bit_equal({first}, {(x + 1).cos().detach()});
  require_bit_equal(grad_of(y, {x}), {first});
}

// ---- errors ----------------------------------------------------------------------------------

TEST_CASE("what begin_store throws reaches the operator that saves, and loses nothing", "[place]") {
  const auto script = std::make_shared<Script>();
  const Tensor x = leaf({32});
  const LiveBytes bytes;
  {
    const auto guard = guard_of(script);
    const Tensor before = (x + 1).sin();
    script->on_begin_store = [](int, const Tensor&) -> bool { throw std::out_of_range("full"); };
    CHECK_THROWS_AS((x + 2).sin(), std::out_of_range);
    script->on_begin_store = [](int, const Tensor&) -> bool { throw 7; };
    CHECK_THROWS_WITH((x + 2).sin(), contains("is not a std::exception"));
    script->on_begin_store = [](int, const Tensor&) { return true; };
    const Tensor after = (x + 2).sin();
    require_bit_equal(grad_of(before, {x}), {(x + 1).cos().detach()});
    require_bit_equal(grad_of(after, {x}), {(x + 2).cos().detach()});
  }
  CHECK(bytes.held() == 0);
}

TEST_CASE("what begin_store throws at the guard's end is a warning, and the tensor stays",
          "[place]") {
  Warnings warnings;
  const auto script = std::make_shared<Script>();
  const bool is_exception = GENERATE(true, false);
  script->on_begin_store = [=](int, const Tensor&) -> bool {
    if (is_exception) throw std::runtime_error("no room");
    throw 7;
  };
  const Tensor x = leaf({32});
  Tensor y;
  {
    const auto guard = guard_of(script);
    y = x * at::full({32}, 2.f);  // the factor waits until its operator is over
  }
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("a saved tensor stays in memory"));
  CHECK_THAT(warnings.texts[0], contains(is_exception ? "no room" : "is not a std::exception"));
  require_bit_equal(grad_of(y, {x}), {at::full({32}, 2.f)});
}

TEST_CASE("a place that gives back something else gets an error that says what, and may do better",
          "[place]") {
  const auto script = std::make_shared<Script>();
  const Tensor x = leaf({32});
  const Tensor y = chain_under(script, x);
  const std::vector<std::pair<std::function<Tensor(Tensor)>, std::string>> all{
      {[](const Tensor&) { return Tensor(); }, "returned an undefined tensor"},
      {[](const Tensor& t) { return t.slice(0, 1).clone(); }, "loaded: [127] of "},
      {[](const Tensor& t) { return t.view({2, 64}).clone(); }, "loaded: [2, 64] of "},
      {[](const Tensor& t) { return t.to(at::kInt); }, "loaded: [128] of int on cpu"},
      {[](const Tensor& t) { return t.view(at::kFloat).clone(); }, "loaded: [32] of float on cpu"},
      {[](const Tensor& t) { return t.to(at::kMeta); }, "on meta"},
      {[](const Tensor& t) { return t.to_sparse(); }, "loaded: [128] of "},
  };
  for (const auto& [give, words] : all) {
    script->on_finish_load = [&give](int, const Tensor& held) { return give(held); };
    const auto error = error_of<c10::ValueError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
    CHECK_THAT(text_of(error), contains(words));
    CHECK_THAT(text_of(error), contains("Hint: return from finish_load"));
  }
  script->on_finish_load = [](int, const Tensor& held) { return held.clone(); };
  require_bit_equal(grad_of(y, {x}), grad_of(chain(x), {x}));
  drop_ready_nodes();
}

TEST_CASE("after a load that threw the same backward can be tried again", "[place]") {
  const auto script = std::make_shared<Script>();
  script->is_late = GENERATE(false, true);
  const Tensor x = leaf({32});
  const Tensor y = chain_under(script, x);
  const auto backward = [&] { return grad_of(y, {x}, {.retain_graph = true}); };
  const auto copy = script->on_finish_load;
  script->on_finish_load = [](int number, const Tensor& held) {
    if (number == 2) throw std::out_of_range("lost for now");
    return held.clone();
  };
  CHECK_THROWS_AS(backward(), std::out_of_range);
  script->on_finish_load = [](int, const Tensor&) -> Tensor { throw 7; };
  CHECK_THROWS_WITH(backward(), contains("is not a std::exception"));
  script->on_finish_load = copy;
  require_bit_equal(backward(), grad_of(chain(x), {x}));
  drop_ready_nodes();
}

// ---- loads that are begun ahead ----------------------------------------------------------------

TEST_CASE("backward begins the load of what was saved before what it reads", "[place]") {
  const auto script = std::make_shared<Script>();
  const auto [depth, events] = GENERATE(table<int64_t, std::string>({
      {0, "finish_load 3, drop 3, finish_load 2, drop 2, finish_load 1, drop 1"},
      {1,
       "finish_load 3, begin_load 2, drop 3, finish_load 2, begin_load 1, drop 2, finish_load 1, "
       "drop 1"},
      {2,
       "finish_load 3, begin_load 2, begin_load 1, drop 3, finish_load 2, drop 2, finish_load 1, "
       "drop 1"},
      {std::numeric_limits<int64_t>::max(),
       "finish_load 3, begin_load 2, begin_load 1, drop 3, finish_load 2, drop 2, finish_load 1, "
       "drop 1"},
  }));
  const Tensor x = leaf({32});
  const Tensor y = chain_under(script, x, {.prefetch_depth = depth});
  CHECK(script->events() == "begin_store 1, begin_store 2, begin_store 3");
  require_bit_equal(grad_of(y, {x}), grad_of(chain(x), {x}));
  CHECK(script->events() == events);
}

TEST_CASE("a load that nobody waits for is cancelled when its backward ends", "[place]") {
  struct Throws : torch::autograd::FunctionPreHook {
    torch::autograd::variable_list operator()(const torch::autograd::variable_list&) override {
      throw std::out_of_range("a hook");
    }
  };
  const auto script = std::make_shared<Script>();
  const Tensor x = leaf({32});
  Tensor first, second;
  {
    const auto guard = guard_of(script);
    first = (x + 1).sin();
    second = (x + 2).sin();
  }
  script->events();
  grad_of(second, {x}, {.retain_graph = true});
  CHECK(script->events() == "finish_load 2, begin_load 1, cancel_load 1");
  // Also when it ends in an error.
  const Tensor y = chain_under(script, x);
  y.grad_fn()->next_edge(0).function->add_pre_hook(std::make_unique<Throws>());
  script->events();
  CHECK_THROWS_AS(grad_of(y, {x}, {.retain_graph = true}), std::out_of_range);
  drop_ready_nodes();
  CHECK(script->events() == "finish_load 5, begin_load 4, cancel_load 4");
  // Outside backward there is no telling what comes next.
  script->events();
  read_saved(first, &nodes::SinBackward0::self_);
  CHECK(script->events() == "finish_load 1");
}

TEST_CASE("what begin_load throws is left to the read", "[place]") {
  const auto script = std::make_shared<Script>();
  const bool is_exception = GENERATE(true, false);
  script->on_begin_load = [=](int) {
    if (is_exception) throw std::runtime_error("no memory to spare");
    throw 7;
  };
  const Tensor x = leaf({32});
  const Tensor y = chain_under(script, x);
  script->events();
  require_bit_equal(grad_of(y, {x}), grad_of(chain(x), {x}));
  CHECK_THAT(script->events(), contains("begin_load 2, drop 3, finish_load 2"));
}

// ---- copies out beside the work ----------------------------------------------------------------

TEST_CASE("a store is finished before the first load, once", "[place]") {
  const auto script = std::make_shared<Script>();
  script->is_late = true;
  const Tensor x = leaf({32});
  const Tensor y = chain_under(script, x, {.prefetch_depth = 0});
  CHECK(script->events() == "begin_store 1, begin_store 2, begin_store 3");
  const Tensor first = grad_of(y, {x}, {.retain_graph = true})[0];
  CHECK(script->events() ==
        "finish_store 3, finish_load 3, finish_store 2, finish_load 2, finish_store 1, "
        "finish_load 1");
  require_bit_equal(grad_of(y, {x}), {first});
  CHECK(script->events() == "finish_load 3, drop 3, finish_load 2, drop 2, finish_load 1, drop 1");
  require_bit_equal({first}, grad_of(chain(x), {x}));
}

TEST_CASE("what is changed in place raises if it is stored late, else has the values of the save",
          "[place]") {
  const auto script = std::make_shared<Script>();
  script->is_late = GENERATE(true, false);
  const Tensor x = leaf({32});
  const bool requires_grad = GENERATE(true, false);
  Tensor y;
  {
    const auto guard = guard_of(script);
    const Tensor h = requires_grad ? x + 1 : (x + 1).detach();
    y = h * x;
    const Tensor next = x.exp();
    h.detach().mul_(3);
  }
  if (script->is_late)
    CHECK_THROWS_WITH(grad_of(y, {x}), contains("modified by an inplace operation"));
  else
    require_bit_equal(grad_of(y, {x}), {(requires_grad ? (x + 1) + x : x + 1).detach()});
  drop_ready_nodes();
}

TEST_CASE("a change in place while the store is being finished raises", "[place]") {
  const auto script = std::make_shared<Script>();
  script->is_late = true;
  const Tensor x = leaf({32});
  const Tensor h = x + 1;
  Tensor y;
  {
    const auto guard = guard_of(script);
    y = h.sin();
  }
  script->on_finish_store = [&](int) { std::thread([&] { h.detach().mul_(3); }).join(); };
  CHECK_THROWS_WITH(grad_of(y, {x}), contains("modified by an inplace operation"));
  drop_ready_nodes();
}

TEST_CASE("unfinished stores hold no more bytes than asked for", "[place]") {
  const auto script = std::make_shared<Script>();
  script->is_late = true;
  const Tensor x = leaf({32});
  const Tensor y = chain_under(script, x, {.prefetch_depth = 0, .max_bytes_in_flight = 2 * 32 * 4});
  CHECK(script->events() == "begin_store 1, begin_store 2, finish_store 1, begin_store 3");
  // Its exception reaches the operator that saves; it is tried again when the tensor is read.
  script->on_finish_store = [](int number) {
    if (number == 4) throw std::out_of_range("full");
  };
  {
    const auto guard = guard_of(script, {.max_bytes_in_flight = 0});
    const Tensor h = (x + 1).sin();
    CHECK_THROWS_AS(h.sin(), std::out_of_range);
    script->on_finish_store = [](int) {};
    require_bit_equal(grad_of(h, {x}), {(x + 1).cos().detach()});
  }
  require_bit_equal(grad_of(y, {x}), grad_of(chain(x), {x}));
}

// ---- surroundings ----------------------------------------------------------------------------

TEST_CASE("what a place computes meets no hooks, policy, profiler or autocast", "[place]") {
  const auto script = std::make_shared<Script>();
  const Tensor weights = leaf({4, 4});
  int64_t wrong = 0;
  const auto work = [&] {
    const c10::AutoGradMode with_grad(true);
    const Tensor product = weights.mm(weights).cosh();
    if (product.requires_grad() || product.scalar_type() != at::kFloat) ++wrong;
    // Its own saves do not come back to it.
    const SavedVariable saved(product.detach() * 1, false);
    if (!at::equal(saved.unpack(), product)) ++wrong;
    // Neither does a region of its own.
    checkpoint([](const Tensor& t) { return t.sin(); }, weights);
  };
  script->on_begin_store = [&](int, const Tensor&) {
    work();
    return true;
  };
  script->on_finish_load = [&](int, const Tensor& held) {
    work();
    return held.clone();
  };
  const Tensor x = leaf({8, 8});
  Calls asked;
  const auto block = [](const Tensor& t) { return t.mm(t).sin().tanh(); };
  const auto run = [&](bool guarded) {
    asked.reset();
    Tensor y;
    {
      const auto guard = guarded ? guard_of(script) : nullptr;
      y = checkpoint(
          {.policy = remat::save_ops({"aten::mm"})},
          [&](const Tensor& t) {
            asked();
            const Tensor h = block(t);
            const auto inner = guarded ? guard_of(script) : nullptr;
            return block(h);
          },
          x + 1);
    }
    const Tensor grad = grad_of(y, {x})[0];
    CHECK(asked.count() == 2);
    return grad;
  };
  const Tensor plain = run(false);
  const OpCounter ops;
  require_bit_equal({run(true)}, {plain});
  CHECK(ops.count("aten::mm") > 0);
  CHECK(ops.count("aten::cosh") == 0);
  CHECK(wrong == 0);
  CHECK(script->num_stored > 3);
}

TEST_CASE("a place's operators are not cast by autocast", "[place]") {
  const auto script = std::make_shared<Script>();
  const Tensor a = at::randn({4, 4}), product = a.mm(a);
  bool is_cast = false;
  script->on_begin_store = [&](int, const Tensor&) {
    is_cast |= !at::equal(a.mm(a), product);
    return true;
  };
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Tensor y = chain_under(script, leaf({8}));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK(script->num_stored == 3);
  CHECK_FALSE(is_cast);
}

TEST_CASE("places and regions work in both orders, and in double backward", "[place]") {
  const auto script = std::make_shared<Script>();
  script->is_late = GENERATE(false, true);
  const auto block = [](const Tensor& t) { return (t * t.sin()).exp().sin(); };
  require_same_grads([&](const Tensor& x) { return block(block(x + 1)); },
                     [&](const Tensor& x) {
                       const auto around = guard_of(script);
                       return checkpoint(
                           [&](const Tensor& t) {
                             const auto inside = guard_of(script);
                             return block(t);
                           },
                           checkpoint(block, x + 1));
                     },
                     leaf({6, 5}));
  const Tensor x = leaf({9}, at::kDouble);
  const auto second = [&](const Tensor& y) {
    const Tensor first = grad_of(y, {x}, {.create_graph = true})[0];
    return grad_of(first.sin(), {x})[0];
  };
  const Tensor plain = second(chain(x));
  const auto guard = guard_of(script);
  require_bit_equal({second(chain(x))}, {plain});
}

TEST_CASE("contents are asked by one thread at a time", "[place][threads]") {
  const auto script = std::make_shared<Script>();
  script->is_late = GENERATE(false, true);
  const Tensor x = leaf({2000});
  const Tensor y = chain_under(script, x, {.max_bytes_in_flight = 8000});
  const Tensor expected = grad_of(chain(x), {x})[0];
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int index = 0; index < 4; ++index)
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i)
        if (!at::equal(grad_of(y, {x}, {.retain_graph = true})[0], expected)) ++wrong;
    });
  for (std::thread& each : threads) each.join();
  CHECK(wrong == 0);
  CHECK(script->num_at_once == 0);
}

TEST_CASE("who waits for contents lets go of what the binding holds", "[place][threads][binding]") {
  // As an interpreter's lock: the first thread has it and waits for the contents, which the second
  // one loads; that takes the lock.
  static thread_local bool holds;
  struct Callbacks final : remat::WaitCallbacks {
    std::mutex language;
    std::shared_ptr<void> let_go() noexcept override {
      if (!holds) return nullptr;
      language.unlock();
      return {nullptr, [this](void*) { language.lock(); }};
    }
  } callbacks;
  remat::set_wait_callbacks(&callbacks);
  const auto script = std::make_shared<Script>();
  std::atomic<bool> is_loading{false}, got_language{false};
  script->on_finish_load = [&](int, const Tensor& t) {
    if (!is_loading.exchange(true)) {
      // No timed mutex: the thread sanitizer of g++ 12 does not see that one is locked.
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!(got_language = callbacks.language.try_lock()) &&
             std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
      if (got_language) callbacks.language.unlock();
    }
    return t.clone();
  };
  const Tensor x = leaf({64});
  Tensor y, z, of_second;  // two nodes, each of which locks itself, that saved the same
  {
    const SaveElsewhereGuard guard(std::make_unique<Keeper>(script));
    y = x * 2;
    z = y.sin();
    of_second = y.cos();
  }
  callbacks.language.lock();
  holds = true;
  std::thread second([&] { grad_of(of_second, {y}); });
  while (!is_loading) std::this_thread::yield();
  const Tensor gradient = grad_of(z, {y})[0];
  holds = false;
  callbacks.language.unlock();
  second.join();
  remat::set_wait_callbacks(nullptr);
  CHECK(got_language);
  CHECK(bit_equal(gradient, y.detach().cos()));
}
