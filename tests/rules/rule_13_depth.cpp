// Rule 13: long chains and deep nests of regions are run, differentiated and freed on small stacks.

#include <ATen/Parallel.h>
#include <pthread.h>

#include <exception>

#include "tests/support/functions.h"
#include "tests/support/support.h"

namespace {

using remat::CheckpointError;

// Instrumented functions need larger stack frames, or have them elsewhere than on the stack.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_instrumented = true;
constexpr size_t small_stack_kb = 4096;  // the sanitizer's own thread-local data lies on it too
#else
constexpr bool is_instrumented = false;
constexpr size_t small_stack_kb = 256;
#endif

#if defined(__SANITIZE_THREAD__)
constexpr int fewer = 20;  // each access it remembers takes memory
#else
constexpr int fewer = 1;
#endif

/// The part of a thread's stack that thread-local data take: those of CUDA's libraries are large.
size_t bytes_above_frames() {
  size_t bytes = 0;
  std::thread([&bytes] {
    pthread_attr_t attributes;
    void* lowest = nullptr;
    size_t size = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
    pthread_attr_getstack(&attributes, &lowest, &size);
    pthread_attr_destroy(&attributes);
    bytes = static_cast<size_t>(static_cast<char*>(lowest) + size -
                                static_cast<char*>(__builtin_frame_address(0)));
  }).join();
  return bytes / 4096 * 4096;
}

/// Runs `f` on a thread with a stack of that size and rethrows what it throws. No assertions in
/// `f`: what they print may need more stack than there is.
template <class F>
void on_small_stack(F f) {
  struct Job {
    F& f;
    std::exception_ptr error{};
  } job{f};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  static const size_t stack_bytes = (small_stack_kb << 10) + bytes_above_frames();
  REQUIRE(pthread_attr_setstacksize(&attributes, stack_bytes) == 0);
  pthread_t thread;
  const int failure = pthread_create(
      &thread, &attributes,
      [](void* data) -> void* {
        auto& job = *static_cast<Job*>(data);
        try {
          at::set_num_threads(1);
          job.f();
        } catch (...) {
          job.error = std::current_exception();
        }
        return nullptr;
      },
      &job);
  pthread_attr_destroy(&attributes);
  REQUIRE(failure == 0);
  pthread_join(thread, nullptr);
  if (job.error) std::rethrow_exception(job.error);
}

// ---- chains

TEST_CASE("long chains are freed on a small stack, with and without a backward before",
          "[rule-13]") {
  constexpr int num_nodes = 150000 / fewer, num_regions = 100000 / fewer;
  enum class Chain { Nodes, Regions, CapturedRegions };
  const Chain chain = GENERATE(Chain::Nodes, Chain::Regions, Chain::CapturedRegions);
  const Backward backward = GENERATE(Backward::None, Backward::Once, Backward::Retained);
  CAPTURE(static_cast<int>(chain), static_cast<int>(backward));
  const Tensor x = leaf({1});
  Calls calls;
  auto build = [&]() -> Tensor {
    if (chain == Chain::Nodes) {
      return remat::checkpoint(
          [&calls](Tensor t) {
            calls();
            for (int i = 0; i < num_nodes; ++i) t = t.sin();
            return t;
          },
          x);
    }
    Tensor t = x;
    for (int i = 0; i < num_regions; ++i) {
      if (chain == Chain::Regions) {
        t = remat::checkpoint(
            [&calls](const Tensor& u) {
              calls();
              return u.sin();
            },
            t);
      } else {  // each function owns the graph below it
        t = remat::checkpoint([&calls, t] {
          calls();
          return t.sin();
        });
      }
    }
    return t;
  };
  const Counted done;
  LiveBytes bytes;
  int64_t frames_before_end = -1, frames_at_end = -1;
  on_small_stack([&] {
    Tensor y = build();
    run_backward(backward, y);
    frames_before_end = remat::counters().frames_alive;
    y = Tensor();
    frames_at_end = remat::counters().frames_alive;
  });
  const int64_t num_frames = chain == Chain::Nodes ? 1 : num_regions;
  CHECK(done.now().frames_created == num_frames);
  CHECK(frames_before_end == (backward == Backward::Once ? 0 : num_frames));
  CHECK(frames_at_end == 0);
  CHECK(calls.count() == (backward == Backward::None ? 1 : 2) * num_frames);
  CHECK(done.now().tensors_dropped == (chain == Chain::Nodes ? num_nodes : num_regions));
  x.mutable_grad() = Tensor();
  CHECK(bytes.held() == 0);
}

TEST_CASE("ten thousand regions in a chain run forward and backward", "[rule-13]") {
  constexpr int count = 10000, size = 16;
  constexpr int64_t tensor_bytes = size * 4;
  const bool early_stop = GENERATE(true, false);
  CAPTURE(early_stop);
  const remat::EarlyStopGuard guard(early_stop);
  const Tensor x = leaf({size}), w = leaf({size});
  Calls calls;
  auto f = counted(calls, [&](const Tensor& t) { return (t * w).sin().sin(); });
  Tensor t = x;
  for (int i = 0; i < count; ++i) t = f(t);
  const Tensors plain = grad_of(t, {x, w});
  t = x;
  calls.reset();
  const Counted done;
  LiveBytes bytes;
  for (int i = 0; i < count; ++i) t = remat::checkpoint(f, t);
  CHECK(bytes.held() == count * tensor_bytes);  // the boundaries, and the last result
  CHECK(remat::counters().frames_alive == count);
  bytes.reset_peak();
  const Tensors grads = grad_of(t, {x, w});
  // One region's tensors and some gradients at a time, on top of the boundaries.
  CHECK(bytes.peak() <= (count + 20) * tensor_bytes);
  CHECK(bytes.held() == 3 * tensor_bytes);
  require_bit_equal(grads, plain);
  CHECK(calls.count() == 2 * count);
  CHECK(done.now().recomputes == count);
  CHECK(done.now().tensors_recomputed == 4 * count);
  CHECK(remat::counters().frames_alive == 0);
}

// ---- nests

/// A region in a region, `depth` deep: sin before the inner one, or after it.
Tensor nest(int depth, bool before, Calls& calls, const Tensor& x) {
  return remat::checkpoint(
      [depth, before, &calls](const Tensor& t) {
        calls();
        if (depth == 1) return t.sin();
        return before ? nest(depth - 1, before, calls, t.sin())
                      : nest(depth - 1, before, calls, t).sin();
      },
      x);
}

TEST_CASE("a thousand nested regions run forward and backward", "[rule-13]") {
  const bool before = GENERATE(true, false);
  // Where the operator comes after the inner region, each level runs all levels below it again.
  const int depth = (before ? 1000 : 300) / (is_instrumented ? 5 : 1);
  CAPTURE(before);
  const Tensor x = leaf({8});
  Calls calls;
  Tensor t = x;
  for (int i = 0; i < depth; ++i) t = t.sin();
  const Tensors plain = grad_of(t, {x});
  t = Tensor();
  const Counted done;
  LiveBytes bytes;
  const Tensor y = nest(depth, before, calls, x);
  CHECK(calls.count() == depth);
  CHECK(bytes.held() == 8 * 4);  // the result
  CHECK(remat::counters().frames_alive == depth);
  const Tensors grads = grad_of(y, {x});
  require_bit_equal(grads, plain);
  CHECK(done.now().recomputes == depth);
  // Before: a recompute ends where the inner region has its input. After: a region at depth d runs
  // for itself and for every region around it.
  CHECK(calls.count() == (before ? 2 * depth : depth + depth * (depth + 1) / 2));
  CHECK(bytes.held() == 2 * 8 * 4);
  CHECK(remat::counters().frames_alive == 0);
}

TEST_CASE("regions without end in one another end in an error on a small stack", "[rule-13]") {
#if defined(__SANITIZE_THREAD__)
  return;  // it keeps a second stack of its own, which ends first
#endif
  const Tensor x = leaf({8});
  std::optional<CheckpointError> error;
  Tensors grads;
  int64_t frames_after_error = -1;
  Calls calls, calls_after;
  on_small_stack([&] {
    try {
      nest(1 << 30, /*before=*/true, calls, x);
    } catch (const CheckpointError& e) {
      error = e;
    }
    frames_after_error = remat::counters().frames_alive;
    grads = grad_of(nest(3, true, calls_after, x), {x});  // the thread goes on working
  });
  REQUIRE(error);
  CHECK(error->kind() == CheckpointError::Kind::Unsupported);
  CHECK_THAT(text_of(*error), contains("nested too deep for this thread's stack"));
  CHECK(calls.count() >= 20);
  CHECK(frames_after_error == 0);
  require_bit_equal(grads, grad_of(x.sin().sin().sin(), {x}));
  CHECK(calls_after.count() == 6);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE(
    "a backward through more levels than the stack can hold ends in an error, on a larger "
    "one it works",
    "[rule-13][rule-12]") {
  if (is_instrumented) return;  // the stack that is small enough here is not small enough there
  const bool before = GENERATE(true, false);
  CAPTURE(before);
  const int depth = before ? 1000 : 300;
  const Tensor x = leaf({8});
  Tensor t = x;
  for (int i = 0; i < depth; ++i) t = t.sin();
  const Tensors plain = grad_of(t, {x});
  t = Tensor();
  Calls calls;
  const Tensor y = nest(depth, before, calls, x);
  std::optional<CheckpointError> error;
  int64_t bytes_after_error = -1;
  LiveBytes bytes;
  Tensor other_grad;
  on_small_stack([&] {
    try {
      grad_of(y, {x}, {.retain_graph = true});
    } catch (const CheckpointError& e) {
      error = e;
    }
    bytes_after_error = remat::counters().recomputed_bytes_alive;
    other_grad = grad_of(remat::checkpoint([](const Tensor& u) { return u.sin(); }, x), {x})[0];
  });
  REQUIRE(error);
  CHECK_THAT(text_of(*error), contains("nested too deep for this thread's stack"));
  CHECK(bytes_after_error == 0);
  require_bit_equal({other_grad}, {x.cos().detach()});
  other_grad = Tensor();
  CHECK(bytes.held() == 0);
  CHECK(remat::counters().frames_alive == depth);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(remat::counters().frames_alive == 0);
}

}  // namespace
