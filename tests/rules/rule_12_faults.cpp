// Rule 12: a fault at any operator or allocation leaves nothing behind, and a retry is bit-equal.

#include <torch/library.h>

#include "tests/support/fault.h"
#include "tests/support/support.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Throws a Fault from the n-th operator call of this thread and of the backward passes it runs,
/// above autograd and inside kernels alike.
class FaultAt {
 public:
  explicit FaultAt(int64_t index) : include_(c10::DispatchKey::TESTING_ONLY_GenericMode) {
    library();
    next_ = 0;
    index_ = index;
  }
  ~FaultAt() { index_ = -1; }
  static int64_t operators() { return next_; }

 private:
  static void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
    if (next_++ == index_) throw Fault("at operator " + op.schema().name());
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER,
                                                  c10::DispatchKey::TESTING_ONLY_GenericMode),
                       stack);
  }
  static void library() {
    static torch::Library all(torch::Library::IMPL, "_", c10::DispatchKey::TESTING_ONLY_GenericMode,
                              __FILE__, __LINE__);
    static const bool once = [] {
      all.fallback(torch::CppFunction::makeFromBoxedFunction<&FaultAt::call>());
      return true;
    }();
    (void)once;
  }

  c10::impl::IncludeDispatchKeyGuard include_;
  static inline std::atomic<int64_t> next_{0}, index_{-1};
};

struct SavesInputAndOutput : torch::autograd::Function<SavesInputAndOutput> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x) {
    const Tensor y = x.exp();
    ctx->save_for_backward({x, y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {grads[0] * ctx->get_saved_variables()[1]};
  }
};

/// Nested regions with all that unwinds: dropout, guards, hooks, in-place operators, a gradient.
std::pair<Tensor, Tensor> eventful(const Tensor& x, const Tensor& w) {
  auto inner = [&w](const Tensor& t, const std::map<std::string, Tensor>& named) {
    Tensor h = at::dropout(t.mm(w), 0.5, true) * named.at("scale");
    Tensor noise;
    {
      at::NoGradGuard no_grad;
      noise = at::rand({4, 4}) * h;
    }
    h = (h * noise + t).clone();
    h.narrow(0, 0, 2).sin_();
    return SavesInputAndOutput::apply(h * 0.1);
  };
  return remat::checkpoint(
      [inner](const Tensor& t) {
        const Tensor h =
            remat::checkpoint(inner, t.tanh(), std::map<std::string, Tensor>{{"scale", t.cos()}});
        Tensor user;
        {
          const remat::SavedTensorHooksGuard hooks([](const Tensor& s) { return s.neg(); },
                                                   [](const Tensor& s) { return s.neg(); });
          user = h.exp();
        }
        const Tensor g = grad_of(h.sin(), {h}, {.retain_graph = true})[0];
        const Tensor r = at::rrelu(user * g, 0.1, 0.9, true);
        return std::pair(r.sin(), at::softmax(h * t, 1));
      },
      x);
}

TEST_CASE("a fault at any operator of forward leaves nothing, and a retry equals plain",
          "[rule-12]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({4, 4}), w = leaf({4, 4});
  const Tensor seed = generator_state();
  auto forward = [&] {
    set_generator_state(seed);
    return eventful(x, w);
  };
  Tensors expected_outputs, expected_grads;
  {
    const auto [a, b] = forward();
    expected_outputs = {a.detach(), b.detach()};
    expected_grads = grad_of(a.sum() + b.sin().sum(), {x, w});
  }
  const Unchanged unchanged;
  int64_t faults = 0;
  for (;; ++faults) {
    CAPTURE(faults);
    bool failed = false;
    {
      const FaultAt fault(faults);
      try {
        forward();
      } catch (const Fault&) {
        failed = true;
      }
    }
    drop_ready_nodes();
    unchanged.require("after a fault in forward");
    if (!failed) break;
    if (faults % 7 != 0) continue;
    const auto [a, b] = forward();
    require_bit_equal({a.detach(), b.detach()}, expected_outputs);
    require_bit_equal(grad_of(a.sum() + b.sin().sum(), {x, w}), expected_grads);
  }
  CHECK(faults > 60);
}

TEST_CASE("a fault at any operator of backward leaves nothing, and a retry is bit-equal",
          "[rule-12]") {
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({4, 4}), w = leaf({4, 4});
  const auto [a, b] = eventful(x, w);
  const Tensor loss = a.sum() + b.sin().sum();
  auto backward = [&] { return grad_of(loss, {x, w}, {.retain_graph = true}); };
  const Tensors expected = backward();
  const Tensor generator = generator_state();
  const Unchanged unchanged;
  int64_t faults = 0;
  for (;; ++faults) {
    CAPTURE(faults);
    bool failed = false;
    {
      const FaultAt fault(faults);
      try {
        backward();
      } catch (const Fault&) {
        failed = true;
      }
    }
    drop_ready_nodes();
    unchanged.require("after a fault in backward");
    REQUIRE(at::equal(generator_state(), generator));
    if (!failed) break;
    require_bit_equal(backward(), expected);
  }
  CHECK(faults > 100);
  CHECK(remat::counters().frames_alive == 2);
}

TEST_CASE("running out of memory anywhere leaves nothing, and a retry is bit-equal", "[rule-12]") {
  constexpr int64_t side = 64, bytes_of_one = side * side * 4;
  const Tensor x = leaf({side, side}), w = leaf({side, side});
  auto block = [&](const Tensor& t) { return at::dropout(t.mm(w).tanh().sin(), 0.2, true).exp(); };
  auto forward = [&] {
    at::manual_seed(5);
    return remat::checkpoint(
        [&](const Tensor& t) {
          return remat::checkpoint(block, remat::checkpoint(block, t) * 0.1).cos();
        },
        x);
  };
  const Seed seed(5);
  const Tensors expected = grad_of(forward(), {x, w});
  int64_t failures_forward = 0, failures_backward = 0;
  for (int64_t room = 0;; room += bytes_of_one / 2) {
    CAPTURE(room);
    const Unchanged unchanged;
    Tensor y;
    {
      const remat::MemoryLimitGuard limit(remat::MemoryMeter().live_bytes() + room);
      try {
        y = forward();
      } catch (const c10::OutOfMemoryError&) {
        ++failures_forward;
      }
    }
    if (!y.defined()) {
      unchanged.require("after forward ran out of memory");
      continue;
    }
    const Unchanged with_graph;
    Tensors grads;
    {
      const remat::MemoryLimitGuard limit(remat::MemoryMeter().live_bytes() + room);
      try {
        grads = grad_of(y, {x, w}, {.retain_graph = true});
      } catch (const c10::OutOfMemoryError&) {
        ++failures_backward;
      }
    }
    const bool failed = grads.empty();
    grads.clear();
    drop_ready_nodes();
    with_graph.require("after backward ran out of memory");
    require_bit_equal(grad_of(y, {x, w}), expected);
    if (!failed) break;
  }
  CHECK(failures_forward > 2);
  CHECK(failures_backward > 2);
}

}  // namespace
