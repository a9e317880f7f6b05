// Rule 5: a recompute ends with the last slot that needs it, and whatever the function does with
// the stop.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include <future>

#include "tests/support/sizes.h"
#include "tests/support/support.h"

namespace {

// ---- where it stops ----------------------------------------------------------------------------

TEST_CASE("code after the last save runs again only with early stop off", "[rule-5]") {
  const Tensor x = leaf({2});
  Calls clones;
  auto f = [&](const Tensor& t) {
    const Tensor h = t.sin().cos();
    clones();
    return h.clone();
  };
  const Tensors plain = grad_of(x.sin().cos(), {x});
  auto clones_after = [&](std::vector<bool> guards, std::optional<bool> option,
                          bool backward_inside) {
    clones.reset();
    std::vector<std::unique_ptr<remat::EarlyStopGuard>> open;
    for (const bool enabled : guards) {
      open.push_back(std::make_unique<remat::EarlyStopGuard>(enabled));
    }
    remat::CheckpointOptions options;
    if (option) options.early_stop = *option;
    const Tensor y = remat::checkpoint(options, f, x);
    if (!backward_inside) {
      while (!open.empty()) open.pop_back();
    }
    require_bit_equal(grad_of(y, {x}), plain);
    while (!open.empty()) open.pop_back();
    return clones.count();
  };
  CHECK(clones_after({}, {}, true) == 1);
  CHECK(clones_after({}, false, true) == 2);
  CHECK(clones_after({}, true, true) == 1);
  CHECK(clones_after({false}, {}, false) == 2);
  CHECK(clones_after({true}, {}, true) == 1);
  CHECK(clones_after({false, true}, false, true) == 1);
  CHECK(clones_after({false}, true, true) == 2);
  CHECK(clones_after({true}, false, true) == 1);
}

TEST_CASE("an operator that saves its input is stopped before its kernel", "[rule-5]") {
  const Tensor x = leaf({large});
  const Tensors plain = grad_of(x.sin().sin().sin(), {x});
  KernelCounter kernels;
  Counted done;
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.sin().sin().sin(); }, x);
  CHECK(kernels.count("sin") == 3);
  kernels.reset();
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(kernels.count("sin") == 2);
  CHECK(done.now().early_stops == 1);
  CHECK(done.now().recomputes == 1);
}

TEST_CASE("an operator that saves its result runs, and nothing after it", "[rule-5]") {
  const Tensor x = leaf({large});
  KernelCounter kernels;
  const Tensor y = remat::checkpoint([](const Tensor& t) { return t.exp(); }, x);
  CHECK(kernels.count("exp") == 1);
  grad_of(y, {x});
  CHECK(kernels.count("exp") == 2);
}

TEST_CASE("without early stop every kernel runs again and no stop is counted", "[rule-5]") {
  const Tensor x = leaf({large});
  KernelCounter kernels;
  Counted done;
  const Tensor y = remat::checkpoint(
      {.early_stop = false}, [](const Tensor& t) { return t.sin().sin().sin(); }, x);
  kernels.reset();
  grad_of(y, {x});
  CHECK(kernels.count("sin") == 3);
  CHECK(done.now().early_stops == 0);
  CHECK(done.now().recomputes == 1);
}

TEST_CASE("a matmul at the end of a region is not run again", "[rule-5]") {
  const Tensor x = leaf({128, 128}), w = leaf({128, 128});
  const Tensors plain = grad_of(x.sin().mm(w), {x, w});
  KernelCounter kernels;
  Counted done;
  const Tensor y = remat::checkpoint([&](const Tensor& t) { return t.sin().mm(w); }, x);
  kernels.reset();
  require_bit_equal(grad_of(y, {x, w}), plain);
  CHECK(kernels.count("mm") == 2);  // the two products of the gradient
  CHECK(kernels.count("sin") == 1);
  CHECK(done.now().early_stops == 1);
}

TEST_CASE("a recompute stops inside a nested region as soon as its own slots are full",
          "[rule-5]") {
  const Tensor x = leaf({large});
  const Tensors plain = grad_of(x.sin().sin().sin(), {x});
  KernelCounter kernels;
  Counted done;
  const Tensor y = remat::checkpoint(
      [](const Tensor& t) {
        return remat::checkpoint([](const Tensor& u) { return u.sin().sin(); }, t.sin());
      },
      x);
  kernels.reset();
  require_bit_equal(grad_of(y, {x}), plain);
  // The outer recompute ends at the inner region's input, the inner one before its second sin.
  CHECK(kernels.count("sin") == 1 + 1);
  CHECK(done.now().recomputes == 2);
  CHECK(done.now().early_stops == 2);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("what surrounds the function unwinds when it is stopped", "[rule-5]") {
  const Tensor x = leaf({large});
  Alive alive;
  Calls forward_left, recompute_left;
  struct Leave {
    Calls& left;
    ~Leave() { left(); }
  };
  remat::CheckpointOptions options;
  options.context_fn = [&] {
    return remat::ContextPair{[&] { return std::make_shared<Leave>(Leave{forward_left}); },
                              [&]() -> remat::Scope {
                                recompute_left();  // entered; leaving adds another
                                return std::shared_ptr<void>(nullptr,
                                                             [&](void*) { recompute_left(); });
                              }};
  };
  forward_left.reset();
  Calls stopped;
  const Tensor y = remat::checkpoint(
      options,
      [&](const Tensor& t) {
        const auto probe = alive.probe();
        struct OnExit {
          Calls& stopped;
          int before = std::uncaught_exceptions();
          ~OnExit() {
            if (std::uncaught_exceptions() > before) stopped();
          }
        } on_exit{stopped};
        const at::AutoGradMode grad(true);
        const Tensor h = t.sin();
        at::NoGradGuard no_grad;
        const at::AutoGradMode grad_again(true);
        return h.cos();
      },
      x);
  const Tensors grads = grad_of(y, {x});
  require_bit_equal(grads, grad_of(x.sin().cos(), {x}));
  CHECK(stopped.count() == 1);
  CHECK(alive.count() == 0);
  CHECK(recompute_left.count() == 2);
  CHECK(at::GradMode::is_enabled());
}

// ---- functions that swallow everything --------------------------------------------------------

TEST_CASE("a function that wraps its body in catch (...) gets the right gradient", "[rule-5]") {
  const bool early_stop = GENERATE(true, false);
  const int64_t size = GENERATE(as<int64_t>{}, 3, large);
  CAPTURE(early_stop, size);
  const Tensor x = leaf({size});
  Calls calls;
  auto f = counted(calls, [](const Tensor& t) {
    Tensor h;
    try {
      h = t.sin().exp().cos();
    } catch (...) {
      h = t;  // and on with something else, which saves more
    }
    return h.sin().exp();
  });
  const Tensors plain = grad_of(f(x), {x});
  calls.reset();
  Counted done;
  const Tensor y = remat::checkpoint({.early_stop = early_stop}, f, x);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(calls.count() == 3);
  CHECK(done.now().recomputes == 2);
}

TEST_CASE("a function that catches the stop may do anything after it", "[rule-5]") {
  const Tensor x = leaf({large});
  const Tensors plain = grad_of(x.sin().cos(), {x});
  Counted done;
  SECTION("run other operators, which save") {
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          try {
            return t.sin().cos();
          } catch (...) {
            return t.exp().tanh().sigmoid();
          }
        },
        x);
    require_bit_equal(grad_of(y, {x}), plain);
  }
  SECTION("try again and again") {
    Calls attempts;
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          for (int i = 0; i < 5; ++i) {
            try {
              attempts();
              return t.sin().cos();
            } catch (...) {
            }
          }
          return t.clone();
        },
        x);
    require_bit_equal(grad_of(y, {x}), plain);
    CHECK(attempts.count() == 3);  // forward, the one that is stopped, and one that nothing stops
  }
  SECTION("throw its own exception instead") {
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          try {
            return t.sin().cos();
          } catch (...) {
            throw std::runtime_error("translated");
          }
        },
        x);
    require_bit_equal(grad_of(y, {x}), plain);
  }
  SECTION("carry it through a promise") {
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          std::promise<Tensor> promise;
          try {
            promise.set_value(t.sin().cos());
          } catch (...) {
            promise.set_exception(std::current_exception());
          }
          return promise.get_future().get();
        },
        x);
    require_bit_equal(grad_of(y, {x}), plain);
  }
  SECTION("open another region in the handler") {
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          try {
            return t.sin().cos();
          } catch (...) {
            return remat::checkpoint([](const Tensor& u) { return u.exp().tanh(); }, t * 2);
          }
        },
        x);
    require_bit_equal(grad_of(y, {x}), plain);
  }
  SECTION("run a backward in the handler") {
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          try {
            return t.sin().cos();
          } catch (...) {
            return grad_of(t.exp(), {t}, {.create_graph = true})[0];
          }
        },
        x);
    require_bit_equal(grad_of(y, {x}), plain);
  }
  SECTION("draw random numbers in the handler") {
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          try {
            return t.sin().cos();
          } catch (...) {
            return t * at::rand({7}).sum();
          }
        },
        x);
    require_bit_equal(grad_of(y, {x}), plain);
  }
  SECTION("draw random numbers in the handler, in a region that draws") {
    at::manual_seed(3);
    const Tensor expected = grad_of(at::dropout(x, 0.5, true).cos(), {x})[0];
    at::manual_seed(3);
    const Tensor y = remat::checkpoint(
        [](const Tensor& t) {
          const Tensor h = at::dropout(t, 0.5, true);
          try {
            return h.cos();
          } catch (...) {
            return t * at::rand({7}).sum();
          }
        },
        x);
    const Tensor before = generator_state();
    require_bit_equal(grad_of(y, {x}), {expected});
    CHECK(at::equal(generator_state(), before));
  }
  CHECK(done.now().recomputes == 1);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("catch (...) around a nested region does not keep the stop of its parent", "[rule-5]") {
  const Tensor x = leaf({large});
  auto inner = [](const Tensor& t) { return t.exp().sin(); };
  const Tensors plain = grad_of(inner(x.sin()).cos(), {x});
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        Tensor h = t.sin();
        try {
          h = remat::checkpoint(
              [&](const Tensor& u) {
                try {
                  return inner(u);
                } catch (...) {
                  return u.cos();
                }
              },
              h);
        } catch (...) {
          h = h.tanh();
        }
        return h.cos();
      },
      x);
  for (int i = 0; i < 2; ++i) require_bit_equal(grad_of(y, {x}, {.retain_graph = true}), plain);
  CHECK(remat::counters().frames_alive == 2);
}

TEST_CASE("catch by std::exception does not see the stop", "[rule-5]") {
  const Tensor x = leaf({large});
  Calls caught;
  const Tensor y = remat::checkpoint(
      [&](const Tensor& t) {
        try {
          return t.sin().cos();
        } catch (const std::exception&) {
          caught();
          throw;
        }
      },
      x);
  require_bit_equal(grad_of(y, {x}), grad_of(x.sin().cos(), {x}));
  CHECK(caught.count() == 0);
}

/// Runs the current test case in a process of its own, which calls `f`, and checks that `f` held
/// there and that nothing terminated the process.
template <class F>
void check_in_a_child(F f) {
  if (std::getenv("REMAT_TEST_CHILD") != nullptr) {
    CHECK(f());
    return;
  }
  const std::string name = Catch::getResultCapture().getCurrentTestName();
  setenv("REMAT_TEST_CHILD", "1", 1);
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "cases", name.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  unsetenv("REMAT_TEST_CHILD");
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a destructor that saves while a stop unwinds does not end the process", "[rule-5]") {
  struct AddsUp {
    Tensor tensor;
    double& sum;
    ~AddsUp() { sum += tensor.exp().sum().item<double>(); }
  };
  const Tensor x = leaf({large});
  check_in_a_child([&] {
    double sum = 0;
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) {
          const Tensor h = t.sin();
          const AddsUp adds_up{h, sum};
          return h.cos().tanh();
        },
        x);
    return bit_equal(grad_of(y, {x})[0], grad_of(x.sin().cos().tanh(), {x})[0]);
  });
}

TEST_CASE("a destructor that runs a backward does not end the process", "[rule-5][rule-6]") {
  struct RunsBackward {
    Tensor argument;
    bool is_region;
    ~RunsBackward() {
      const auto f = [](const Tensor& t) { return t.sin().exp().tanh(); };
      const Tensor y = is_region ? remat::checkpoint(f, argument) : f(argument);
      y.sum().backward();
    }
  };
  const auto is_right = [](int64_t size, bool is_region, bool is_nested) {
    const Tensor x = leaf({size});
    const auto f = [&](const Tensor& t) {
      const RunsBackward object{t.detach().requires_grad_(), is_region};
      return t.sin().exp().tanh();
    };
    const Tensor y = remat::checkpoint(
        [&](const Tensor& t) { return is_nested ? remat::checkpoint(f, t).sin() : f(t); }, x);
    const Tensor plain = x.sin().exp().tanh();
    return bit_equal(grad_of(y, {x})[0], grad_of(is_nested ? plain.sin() : plain, {x})[0]);
  };
  check_in_a_child([&] {
    bool are_right = true;
    for (const int64_t size : {int64_t{8}, large})
      for (const bool is_region : {false, true})
        for (const bool is_nested : {false, true})
          are_right = are_right && is_right(size, is_region, is_nested);
    return are_right;
  });
}

TEST_CASE("a function declared noexcept is not stopped", "[rule-5]") {
  const Tensor x = leaf({large});
  check_in_a_child([&] {
    const Tensor y =
        remat::checkpoint([](const Tensor& t) noexcept { return t.sin().cos().tanh(); }, x);
    return bit_equal(grad_of(y, {x})[0], grad_of(x.sin().cos().tanh(), {x})[0]);
  });
}

}  // namespace
