// A mismatch between forward and recompute: texts, kinds and fields of CheckpointError.

#include <malloc.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::DebugGuard;
using remat::EarlyStopGuard;
using Kind = remat::CheckpointError::Kind;

namespace {

Tensor save3(const Tensor& x) { return x.sin().exp().sin(); }
Tensor save2(const Tensor& x) { return x.sin().exp(); }
Tensor alt2(const Tensor& x) { return x.sin() * at::arange(1, 3, x.options()); }

// The error of one backward through the region; also checks that it leaves nothing (Rule 12).
template <class First, class Later>
CheckpointError mismatch(First first, Later later, const CheckpointOptions& options = {}) {
  const Tensor a = leaf({1});
  Calls calls;
  const Tensor y = checkpoint(options, first_then(calls, first, later), a);
  CheckpointError error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(calls.count() == 2);
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  CHECK_FALSE(a.grad().defined());
  return error;
}

int64_t lines_of(const std::string& text) { return std::count(text.begin(), text.end(), '\n') + 1; }

constexpr auto debug_sentence =
    "You are seeing this error because CheckpointOptions had `debug = true`";

/// REMAT_DEBUG_STACKS for a scope.
struct StacksInDebug {
  explicit StacksInDebug(bool enabled = true) {
    ::setenv("REMAT_DEBUG_STACKS", enabled ? "1" : "0", 1);
  }
  StacksInDebug(const StacksInDebug&) = delete;
  StacksInDebug& operator=(const StacksInDebug&) = delete;
  ~StacksInDebug() { ::unsetenv("REMAT_DEBUG_STACKS"); }
};

/// The lines after `heading` that are indented more than any other.
std::vector<std::string> frames_below(const std::string& text, const std::string& heading) {
  std::vector<std::string> frames;
  std::istringstream lines(text.substr(std::min(text.find(heading), text.size())));
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line) && line.substr(0, 4) == "    ") frames.push_back(line);
  return frames;
}

}  // namespace

TEST_CASE("fewer tensors in the recompute are an error with both counts", "[error][rule-10]") {
  const CheckpointError error = mismatch(save3, save2, {.name = "block 3"});
  CHECK(error.kind() == Kind::FewerTensors);
  CHECK_THAT(text_of(error), contains("A different number of tensors was saved during the original "
                                      "forward and recomputation."));
  CHECK(error.forward_count() == 3);
  CHECK(error.recompute_count() == 2);
  CHECK(error.region() == "block 3");
  CHECK_THAT(text_of(error), contains("block 3"));
}

TEST_CASE("more tensors in the recompute are an error when early stop is off", "[error][rule-10]") {
  const EarlyStopGuard guard(false);
  const CheckpointError error = mismatch(save2, save3);
  CHECK(error.kind() == Kind::MoreTensors);
  CHECK_THAT(text_of(error),
             contains("trying to save more tensors during recomputation than during "
                      "the original forward pass."));
  CHECK(error.forward_count() == 2);
  CHECK(error.recompute_count() == 3);  // packed when it was noticed
}

TEST_CASE("more tensors after the last needed one are not seen with early stop",
          "[error][rule-10]") {
  const Tensor a = leaf({100'000});
  Calls calls;
  const Tensor y = checkpoint(
      first_then(calls, save2, [](const Tensor& x) { return x.sin().exp().cos().sin(); }), a);
  CHECK_NOTHROW(y.sum().backward());
  CHECK(calls.count() == 2);
  require_bit_equal({a.grad()}, grad_of(save2(a), {a}));
}

TEST_CASE("another shape in the recompute is an error with position and both shapes",
          "[error][rule-10]") {
  const bool early_stop = GENERATE(true, false);
  const CheckpointError error = mismatch(save2, alt2, {.early_stop = early_stop});
  CHECK(error.kind() == Kind::MetadataMismatch);
  CHECK_THAT(text_of(error), contains("Recomputed values for the following tensors have different "
                                      "metadata than during the forward pass."));
  REQUIRE(error.mismatches().size() == 1);
  const CheckpointError::Mismatch& found = error.mismatches()[0];
  CHECK(found.position == 1);
  CHECK_THAT(found.forward, contains("[1]"));
  CHECK_THAT(found.recompute, contains("[2]"));
  CHECK_THAT(text_of(error), contains(found.forward));
  CHECK_THAT(text_of(error), contains(found.recompute));
}

TEST_CASE("another dtype in the recompute is an error", "[error][rule-10]") {
  const CheckpointError error =
      mismatch(save2, [](const Tensor& x) { return x.sin().to(at::kDouble).exp(); });
  CHECK(error.kind() == Kind::MetadataMismatch);
  REQUIRE(error.mismatches().size() == 1);
  CHECK(error.mismatches()[0].position == 1);
  CHECK(error.mismatches()[0].forward != error.mismatches()[0].recompute);
}

TEST_CASE("every tensor that differs is listed", "[error][rule-10]") {
  const CheckpointError error = mismatch([](const Tensor& x) { return x.sin().exp().cos(); },
                                         [](const Tensor& x) {
                                           const Tensor two = x.expand({2}).clone();
                                           return two.sin().exp().cos();
                                         });
  CHECK(error.kind() == Kind::MetadataMismatch);
  std::vector<int64_t> positions;
  for (const auto& found : error.mismatches()) positions.push_back(found.position);
  CHECK(positions == std::vector<int64_t>{0, 1, 2});
}

TEST_CASE("debug adds the operators of both passes, in order", "[error][debug]") {
  const CheckpointError error = mismatch(save2, alt2, {.debug = true});
  CHECK(error.kind() == Kind::MetadataMismatch);
  const std::string text = text_of(error);
  CHECK_THAT(text, contains(debug_sentence));
  const size_t forward_at = text.find("Operators of the forward");
  const size_t recompute_at = text.find("Operators of the recompute");
  REQUIRE(forward_at < recompute_at);
  REQUIRE(recompute_at != std::string::npos);
  const std::string forward = text.substr(forward_at, recompute_at - forward_at);
  const std::string recompute = text.substr(recompute_at);
  const auto in_order = [](const std::string& list, const char* first, const char* second) {
    const size_t at = list.find(first);
    return at != std::string::npos && list.find(second, at) != std::string::npos;
  };
  CHECK(in_order(forward, "aten::sin", "aten::exp"));
  CHECK(in_order(recompute, "aten::sin", "aten::mul"));
  CHECK_THAT(forward, !contains("aten::mul"));
  CHECK_THAT(recompute, !contains("aten::exp"));
  REQUIRE(error.mismatches().size() == 1);
  CHECK_THAT(error.mismatches()[0].forward_op, contains("aten::exp"));
  CHECK_THAT(error.mismatches()[0].recompute_op, contains("aten::mul"));
}

TEST_CASE("a debug guard turns debug on over the option; it is read at forward", "[error][debug]") {
  const Tensor a = leaf({1});
  Calls calls;
  Tensor y;
  {
    const DebugGuard guard(true);
    y = checkpoint({.debug = false}, first_then(calls, save2, alt2), a);
  }
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK_THAT(text_of(error), contains(debug_sentence));

  calls.reset();
  y = checkpoint(first_then(calls, save2, alt2), a);
  const DebugGuard too_late(true);
  const auto plain = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK_THAT(text_of(plain), !contains(debug_sentence));
}

TEST_CASE("a debug guard turns debug off over the option", "[error][debug]") {
  const DebugGuard guard(false);
  const CheckpointError error = mismatch(save2, alt2, {.debug = true});
  CHECK_THAT(text_of(error),
             contains("Recomputed values for the following tensors have different"));
  CHECK_THAT(text_of(error), !contains(debug_sentence));
}

TEST_CASE("a debug guard without a value defers to the option", "[error][debug]") {
  const bool debug = GENERATE(true, false);
  const DebugGuard outer(!debug);
  const DebugGuard guard(std::nullopt);
  const CheckpointError error = mismatch(save2, alt2, {.debug = debug});
  CHECK((text_of(error).find(debug_sentence) != std::string::npos) == debug);
}

TEST_CASE("REMAT_DEBUG_STACKS shows where both passes called the first operator that differs",
          "[error][debug]") {
  const StacksInDebug stacks;
  const CheckpointError error = mismatch(save2, alt2, {.debug = true});
  const std::string text = text_of(error);
  INFO(text);
  for (const char* pass : {"Called in the forward by:", "Called in the recompute by:"}) {
    const auto frames = frames_below(text, pass);
    REQUIRE_FALSE(frames.empty());
    CHECK(frames.size() <= 8);
    // The functions of this program are among them; what lies between them and the log is not.
    CHECK(std::any_of(frames.begin(), frames.end(), [](const std::string& frame) {
      return frame.find(program_invocation_short_name) != std::string::npos;
    }));
    for (const std::string& frame : frames) {
      CHECK_THAT(frame, !contains("RecordFunction"));
      CHECK_THAT(frame, !contains("libremat"));
      CHECK_THAT(frame, !contains("torch::autograd::Engine"));  // it asked for the recompute
    }
  }
  // Two calls from two places.
  CHECK(frames_below(text, "Called in the forward")[0] !=
        frames_below(text, "Called in the recompute")[0]);
  CHECK_THAT(text, !contains("REMAT_DEBUG_STACKS"));
}

TEST_CASE("without REMAT_DEBUG_STACKS a debug report has no stacks and says how to get them",
          "[error][debug]") {
  std::optional<StacksInDebug> stacks;
  if (GENERATE(false, true)) stacks.emplace(false);
  const std::string text = text_of(mismatch(save2, alt2, {.debug = true}));
  CHECK_THAT(text, !contains("Called in the"));
  CHECK_THAT(text, contains("REMAT_DEBUG_STACKS=1"));
  stacks.emplace();
  CHECK_THAT(text_of(mismatch(save2, alt2)), !contains("Called in the"));  // no debug mode
}

TEST_CASE("the stacks of forgotten operators are let go", "[error][debug]") {
  const StacksInDebug stacks;
  const Tensor a = leaf({1});
  const auto held_by = [&](int64_t operators) {
    const auto before = ::mallinfo2().uordblks;
    const Tensor y = checkpoint(
        {.debug = true},
        [&](const Tensor& x) {
          for (int64_t i = 0; i < operators; ++i) at::alias(x);  // saves nothing
          return x.sin();
        },
        a);
    return static_cast<int64_t>(::mallinfo2().uordblks - before);
  };
  held_by(2'000);
  const int64_t held = held_by(2'000);
  CHECK(held_by(8'000) < held + held / 2 + 10'000);
}

TEST_CASE("debug with a context_fn is refused", "[error][debug]") {
  const Tensor a = leaf({1});
  Calls calls;
  const auto context_fn = [] { return remat::ContextPair{}; };
  const auto refused = [&](const CheckpointOptions& options) {
    CHECK_THROWS_AS(checkpoint(options, counted(calls, save2), a), c10::ValueError);
    CHECK_THROWS_WITH(checkpoint(options, counted(calls, save2), a),
                      contains("debug=True is incompatible with non-default context_fn"));
  };
  refused({.debug = true, .context_fn = context_fn});
  {
    const DebugGuard guard(true);
    refused({.context_fn = context_fn});
  }
  CHECK(calls.count() == 0);
  CHECK(remat::counters().frames_alive == 0);
  const DebugGuard guard(false);
  checkpoint({.debug = true, .context_fn = context_fn}, counted(calls, save2), a).sum().backward();
  CHECK(calls.count() == 2);
}

TEST_CASE("an exception of the function in the recompute keeps its type and text",
          "[error][rule-12]") {
  struct UserError : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const bool debug = GENERATE(true, false);
  const Tensor a = leaf({1});
  Calls calls;
  const Tensor y = checkpoint({.debug = debug},
                              first_then(calls, save2,
                                         [](const Tensor& x) -> Tensor {
                                           x.sin();
                                           throw UserError("foo");
                                         }),
                              a);
  const UserError error = error_of<UserError>([&] { y.sum().backward(); });
  CHECK(std::string(error.what()) == "foo");
  CHECK(remat::counters().recomputed_bytes_alive == 0);
}

TEST_CASE("a LibTorch error of the function keeps its type", "[error][rule-12]") {
  const Tensor a = leaf({1});
  Calls calls;
  const Tensor y = checkpoint(first_then(calls, save2,
                                         [](const Tensor& x) -> Tensor {
                                           x.sin();
                                           TORCH_CHECK_VALUE(false, "a value of ", 7);
                                         }),
                              a);
  const auto error = error_of<c10::ValueError>([&] { y.sum().backward(); });
  CHECK_THAT(text_of(error), contains("a value of 7"));
}

TEST_CASE("what is no std::exception arrives as itself from forward, wrapped from backward",
          "[error][rule-12]") {
  const Tensor a = leaf({1});
  CHECK_THROWS_AS(checkpoint([](const Tensor&) -> Tensor { throw 42; }, a), int);
  CHECK(remat::counters().frames_alive == 0);

  Calls calls;
  const Tensor y = checkpoint(
      {.name = "odd"}, first_then(calls, save2, [](const Tensor&) -> Tensor { throw 42; }), a);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.kind() == Kind::RecomputeFailed);
  CHECK(error.region() == "odd");
  // The thread is no worker of the engine now: another backward works.
  checkpoint(save2, a).sum().backward();
  CHECK(a.grad().defined());
}

TEST_CASE("the text names region, position and both descriptions in a few lines", "[error]") {
  const bool debug = GENERATE(false, true);
  std::optional<StacksInDebug> stacks;
  if (debug && GENERATE(false, true)) stacks.emplace();
  const int64_t steps = 200;
  const auto chain = [=](bool other) {
    return [=](const Tensor& x) {
      Tensor y = x;
      for (int64_t i = 0; i < steps; ++i) {
        y = other && i == 100 ? y.expand({2}).sin() : y.sin();
      }
      return y;
    };
  };
  const CheckpointError error =
      mismatch(chain(false), chain(true), {.name = "encoder", .debug = debug});
  const std::string text = text_of(error);
  CHECK(lines_of(text) < (debug ? 60 : 40));
  CHECK_THAT(text, contains("remat::checkpoint: "));
  CHECK_THAT(text, contains("encoder"));
  REQUIRE_FALSE(error.mismatches().empty());
  const auto& first = error.mismatches()[0];
  CHECK(first.position == 100);
  CHECK(error.mismatches().size() == 100);
  CHECK_THAT(text, contains(std::to_string(first.position)));
  CHECK_THAT(text, contains(first.forward));
  CHECK_THAT(text, contains(first.recompute));
  CHECK_THAT(text, contains("Hint: "));
  if (debug) {
    CHECK_THAT(first.forward_op, contains("aten::sin"));
    CHECK_THAT(text, contains("aten::expand"));  // the first operator that differs
    CHECK(frames_below(text, "Called in the recompute").empty() == !stacks);
  } else {
    CHECK_THAT(text, contains("debug"));  // how to get the operators
  }
  CHECK(error.region() == "encoder");
  CHECK(error.frame_id() >= 0);
}

TEST_CASE("a report of other tensors and another number of them stays short", "[error][debug]") {
  const StacksInDebug stacks;
  const auto chain = [](int64_t steps, bool other) {
    return [=](const Tensor& x) {
      Tensor y = other ? x.expand({2}).sin() : x.sin();
      for (int64_t i = 0; i < steps; ++i) y = y.sin();
      return y;
    };
  };
  const EarlyStopGuard to_the_end(false);
  const bool is_more = GENERATE(false, true);
  const CheckpointError error =
      mismatch(chain(50, false), chain(is_more ? 60 : 40, true), {.name = "n", .debug = true});
  CHECK(error.kind() == (is_more ? Kind::MoreTensors : Kind::FewerTensors));
  CHECK(error.mismatches().size() > 5);
  CHECK(lines_of(text_of(error)) < 60);
  CHECK_FALSE(frames_below(text_of(error), "Called in the recompute").empty());
}

TEST_CASE("an error knows the frame that current_phase() reports", "[error]") {
  const Tensor a = leaf({1});
  int64_t frame_id = -1;
  Calls calls;
  const Tensor y = checkpoint(
      [&](const Tensor& x) {
        calls();
        if (calls.count() == 1) frame_id = remat::current_phase().frame_id;
        return calls.count() == 1 ? save3(x) : save2(x);
      },
      a);
  const auto error = error_of<CheckpointError>([&] { y.sum().backward(); });
  CHECK(error.frame_id() == frame_id);
  CHECK(error.region().empty());
}

TEST_CASE("a checkpoint error is a c10::Error that can be copied and caught as std::exception",
          "[error]") {
  static_assert(std::is_base_of_v<c10::Error, CheckpointError>);
  static_assert(std::is_copy_constructible_v<CheckpointError>);
  const CheckpointError error = mismatch(save3, save2, {.name = "n"});
  const CheckpointError copy = error;  // NOLINT: the copy is the test
  CHECK(copy.kind() == error.kind());
  CHECK(copy.region() == "n");
  CHECK(std::string(static_cast<const std::exception&>(copy).what()) == error.what());
}
