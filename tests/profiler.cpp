// Regions in LibTorch's own profiler: names, nesting and balance of the scopes.

#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/csrc/autograd/profiler_legacy.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tests/support/functions.h"
#include "tests/support/support.h"

using remat::checkpoint;

namespace {

namespace profiler = torch::autograd::profiler;

/// The user scopes that begin (+) and end (-) on this thread, and in backwards that it calls.
class ScopeLog {
 public:
  ScopeLog() {
    current_ = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& scope) -> std::unique_ptr<at::ObserverContext> {
              current_->add('+', scope);
              return nullptr;
            },
            [](const at::RecordFunction& scope, at::ObserverContext*) {
              current_->add('-', scope);
            })
            .scopes({at::RecordScope::USER_SCOPE}));
  }
  ~ScopeLog() { at::removeCallback(handle_); }
  ScopeLog(const ScopeLog&) = delete;
  ScopeLog& operator=(const ScopeLog&) = delete;

  std::vector<std::string> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    threads.clear();
    return std::exchange(events_, {});
  }
  std::vector<std::thread::id> threads;

 private:
  void add(char what, const at::RecordFunction& scope) {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(what + std::string(scope.name()));
    threads.push_back(std::this_thread::get_id());
  }
  static inline ScopeLog* current_ = nullptr;
  at::CallbackHandle handle_;
  std::mutex mutex_;
  std::vector<std::string> events_;
};

using Log = std::vector<std::string>;

/// A backward that calls a backward, and so on, `depth` deep; then `last`.
void backward_inside_backward(int64_t depth, const std::function<void()>& last) {
  const at::AutoGradMode with_grad(true);
  if (depth == 0) return last();
  const Tensor y = leaf({1}) * 2;
  y.register_hook([&](const Tensor&) { backward_inside_backward(depth - 1, last); });
  y.backward();
}

}  // namespace

TEST_CASE("the runs of a region are scopes of LibTorch's profiler under its name", "[profiler]") {
  const Tensor x = leaf({2, 2});
  const auto inner = [](const Tensor& t) { return checkpoint({.name = "inner"}, two_sins, t); };
  const auto outer = [&](const Tensor& t) { return inner(t.exp()); };
  const Tensor unseen = checkpoint({.name = "before"}, two_sins, x);
  ScopeLog log;
  const Tensor y = checkpoint({.name = "outer"}, outer, x);
  CHECK(log.take() ==
        Log{"+outer (forward)", "+inner (forward)", "-inner (forward)", "-outer (forward)"});
  // The inner region's input comes from a recompute of the outer one, which the inner one waits
  // for.
  y.sum().backward();
  CHECK(log.take() == Log{"+inner", "+outer", "-outer", "-inner"});
  unseen.sum().backward();
  CHECK(log.take() == Log{"+before", "-before"});
  checkpoint(two_sins, x).sum().backward();
  CHECK(log.take() == Log{"+remat::checkpoint (forward)", "-remat::checkpoint (forward)",
                          "+remat::checkpoint", "-remat::checkpoint"});
}

TEST_CASE("a stop ends the scopes that are open, the region's own last", "[profiler][rule-5]") {
  const Tensor x = leaf({100'000});
  const auto f = [](const Tensor& t) {
    const Tensor u = t.sin();
    RECORD_USER_SCOPE("inside");
    return u.sin().exp().cos() + 1;
  };
  ScopeLog log;
  const Counted done;
  const Tensor y = checkpoint({.name = "a"}, f, x);
  log.take();
  y.sum().backward();
  CHECK(done.now().early_stops == 1);
  CHECK(log.take() == Log{"+a", "+inside", "-inside", "-a"});
}

TEST_CASE("what throws in a region leaves no scope open", "[profiler][rule-12]") {
  const Tensor x = leaf({3});
  Calls calls;
  int64_t throws_at = 1;
  const auto f = [&](const Tensor& t) {
    calls();
    const Tensor u = t.sin();
    if (calls.count() == throws_at) throw std::runtime_error("no");
    return u.sin();
  };
  ScopeLog log;
  CHECK_THROWS_WITH(checkpoint({.name = "a"}, f, x), "no");
  CHECK(log.take() == Log{"+a (forward)", "-a (forward)"});
  const Tensor y = checkpoint({.name = "a"}, f, x);
  log.take();
  throws_at = 3;
  CHECK_THROWS_WITH(grad_of(y, {x}, {.retain_graph = true}), "no");
  CHECK(log.take() == Log{"+a", "-a"});
  require_bit_equal(grad_of(y, {x}), grad_of(two_sins(x), {x}));
  CHECK(log.take() == Log{"+a", "-a"});
  {
    const remat::DisableSavedTensorHooksGuard none("no hooks here");
    CHECK_THROWS_WITH(checkpoint({.name = "a"}, f, x), contains("no hooks here"));
  }
  const Log refused = log.take();
  CHECK(std::count(refused.begin(), refused.end(), "+a (forward)") ==
        std::count(refused.begin(), refused.end(), "-a (forward)"));
}

TEST_CASE("a recompute on a thread of the engine is a scope there", "[profiler][rule-7]") {
  const Tensor x = leaf({3});
  ScopeLog log;
  const Tensor y = checkpoint({.name = "deep"}, two_sins, x);
  log.take();
  // Beyond sixty levels the engine goes on in a thread of its pool.
  backward_inside_backward(70, [&] { y.sum().backward(); });
  const auto threads = log.threads;
  CHECK(log.take() == Log{"+deep", "-deep"});
  REQUIRE(threads.size() == 2);
  CHECK(threads[0] == threads[1]);
  CHECK(threads[0] != std::this_thread::get_id());
}

TEST_CASE("LibTorch's older profiler lists regions among the operators", "[profiler]") {
  const Tensor x = leaf({3});
  profiler::enableProfilerLegacy(
      torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::CPU));
  checkpoint({.name = "block 3"}, two_sins, x).sum().backward();
  const auto lists = profiler::disableProfilerLegacy();
  std::string text;
  int64_t open = 0;
  for (const auto& list : lists)
    for (const auto& event : list) {
      const std::string name = event.name();
      if (event.kindStr() == std::string("push")) ++open;
      if (event.kindStr() == std::string("pop")) --open;
      if (name == "block 3" || name == "block 3 (forward)" || name == "aten::sin")
        text += name + "; ";
    }
  CHECK(open == 0);
  CHECK(text ==
        "block 3 (forward); aten::sin; aten::sin; "
        "block 3; aten::sin; aten::sin; ");
}

TEST_CASE("LibTorch's profiler times recomputes", "[profiler]") {
  using torch::profiler::impl::ActivityType;
  const Tensor x = leaf({3});
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, {ActivityType::CPU});
  profiler::enableProfiler(config, {ActivityType::CPU});
  const Tensor y = checkpoint({.name = "block 3"}, two_sins, x);
  y.sum().backward(/*gradient=*/{}, /*retain_graph=*/true);
  y.sum().backward();
  const auto result = profiler::disableProfiler();
  std::map<std::string, int64_t> found;
  const profiler::KinetoEvent* recompute = nullptr;
  for (const auto& event : result->events()) {
    ++found[event.name()];
    if (event.name() == "block 3") recompute = &event;
  }
  CHECK(found["block 3 (forward)"] == 1);
  CHECK(found["block 3"] == 2);
  REQUIRE(recompute != nullptr);
  // The operators that run again lie in it.
  CHECK(std::any_of(result->events().begin(), result->events().end(), [&](const auto& event) {
    return event.name() == "aten::sin" && event.startNs() >= recompute->startNs() &&
           event.startNs() + event.durationNs() <= recompute->startNs() + recompute->durationNs();
  }));
}
