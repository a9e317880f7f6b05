// Recorder under a BudgetGuard: dropped results, calls that run again, and the budget over time.

#include <remat/budget.h>

#include <limits>
#include <optional>
#include <sstream>

#include "tests/support/files.h"
#include "tests/support/support.h"

using namespace remat::testing;
using remat::BudgetGuard;
using remat::EvictionReport;
using remat::MemoryMeter;
using remat::Recorder;

namespace {

constexpr int64_t depth = 10, value_bytes = 40'000;

/// A chain of operators, each of which saves its result.
Tensor chain(Tensor x) {
  for (int64_t i = 0; i < depth; ++i) x = x.tanh();
  return x;
}

/// A step in half of its memory.
remat::BudgetReport step_in_half(const Tensor& x) {
  const BudgetGuard guard({.bytes = depth * value_bytes / 2, .min_bytes = 0});
  chain(x).sum().backward();
  return guard.report();
}

std::vector<std::string> lines_with(const std::string& text, const std::string& words) {
  std::vector<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.find(words) != line.npos) found.push_back(line);
  return found;
}

int64_t live_of(const std::string& line) { return std::stoll(line.substr(line.rfind(", ") + 2)); }

}  // namespace

TEST_CASE("a recorder sums what budgets drop and run again, by operator", "[recorder][budget]") {
  const Tensor x = leaf({100, 100});
  const Recorder recorder;
  const remat::BudgetReport done = step_in_half(x);
  REQUIRE(done.evictions > 0);
  REQUIRE(done.reruns > 0);
  const std::vector<EvictionReport> sums = recorder.report().evictions;
  REQUIRE(sums.size() == 1);
  CHECK(sums[0].op == "aten::tanh.default");
  CHECK(sums[0].evictions == done.evictions);
  CHECK(sums[0].bytes_evicted == done.evictions * value_bytes);
  CHECK(sums[0].reruns == done.reruns);
  CHECK(sums[0].bytes_rerun == done.reruns * value_bytes);
  CHECK(sums[0].rerun_s >= done.rerun_s);
  CHECK(sums[0].rerun_s < done.rerun_s + 1);
}

TEST_CASE("the event log tells what a budget drops and runs again", "[recorder][budget]") {
  const Tensor x = leaf({100, 100});
  const int64_t limit = MemoryMeter().live_bytes() + depth * value_bytes / 2;
  const bool with_memory = GENERATE(true, false);
  const Recorder recorder({.memory = with_memory});
  const remat::BudgetReport done = step_in_half(x);
  const std::string log = recorder.event_log();
  CHECK(log.find("budget of " + std::to_string(limit) + " bytes alive on cpu\n") == 0);
  const std::string end = "no budget any more on cpu\n";
  CHECK(log.rfind(end) == log.size() - end.size());
  const auto dropped =
      lines_with(log, "budget drops the result of aten::tanh.default, 40000 bytes, ");
  const auto again = lines_with(log, "budget runs aten::tanh.default again, 40000 bytes, ");
  CHECK(static_cast<int64_t>(dropped.size()) == done.evictions);
  CHECK(static_cast<int64_t>(again.size()) == done.reruns);
  CHECK(log.find("budget drops") < log.find("budget runs"));
  for (const std::string& line : dropped) CHECK(live_of(line) <= limit - value_bytes);
  for (const std::string& line : again) CHECK(live_of(line) <= limit);
}

TEST_CASE("the least budget of all guards is recorded, also one that was there before",
          "[recorder][budget]") {
  const MemoryMeter meter;
  const int64_t live = meter.live_bytes();
  const auto line = [&](int64_t bytes) {
    return "budget of " + std::to_string(live + bytes) + " bytes alive on cpu\n";
  };
  std::optional<BudgetGuard> outer;
  outer.emplace(remat::BudgetOptions{.bytes = 1000});
  const Recorder recorder;
  {
    const BudgetGuard inner({.bytes = 500});
    const BudgetGuard wider({.bytes = 2000});
  }
  outer.reset();
  {
    const BudgetGuard unlimited({.bytes = std::numeric_limits<int64_t>::max()});
  }
  CHECK(recorder.event_log() ==
        line(1000) + line(500) + line(1000) + "no budget any more on cpu\n");
}

TEST_CASE("reports, pages, pictures and traces show a budget", "[recorder][budget]") {
  const Tensor x = leaf({100, 100});
  const Recorder recorder;
  const remat::BudgetReport done = step_in_half(x);
  const std::string text = recorder.report().to_string();
  CHECK_THAT(text, contains("aten::tanh.default"));
  CHECK_THAT(text, contains("calls again"));
  CHECK_THAT(text, contains(std::to_string(done.evictions) + " results of "));
  CHECK_THAT(text, !contains("no region ran"));
  CHECK_THAT(
      recorder.report().to_json(),
      contains(
          "\"evictions\": [\n    {\n      \"op\": \"aten::tanh.default\",\n      \"evictions\": " +
          std::to_string(done.evictions)));
  const std::string page = recorder.to_html();
  CHECK_THAT(page, contains("<h2>Operators under a byte budget</h2>"));
  CHECK_THAT(page, contains("<td>aten::tanh.default</td>"));
  CHECK_THAT(page, contains("stroke-dasharray=\"6 3\""));
  CHECK_THAT(page, contains(">budget: "));
  CHECK_THAT(page, contains("run again for a budget</text>"));
  CHECK_THAT(page, contains("aten::tanh.default again for a budget: 40.0 kB"));
  CHECK_THAT(page, contains("dropped by a budget: 40.0 kB of aten::tanh.default"));
  const Folder folder;
  recorder.write_chrome_trace(folder.path() + "/trace.json");
  const std::string trace = text_in(folder.path() + "/trace.json");
  CHECK_THAT(trace, contains("\"name\":\"aten::tanh.default (again)\",\"cat\":\"rerun\""));
  CHECK_THAT(trace, contains("\"name\":\"drops aten::tanh.default\""));
  CHECK_THAT(trace, contains("\"name\":\"budget\",\"ph\":\"C\""));
}

TEST_CASE("a budget far above the picture is written in words, and old events leave the line",
          "[recorder][budget]") {
  const Tensor x = leaf({100, 100});
  const Recorder wide, small({.max_events = 5});
  {
    const BudgetGuard guard({.bytes = 1'000'000'000});
    chain(x).sum().backward();
  }
  CHECK_THAT(wide.to_html(), contains(" alive, above the picture</text>"));
  CHECK_THAT(wide.to_html(), !contains("stroke-dasharray=\"6 3\""));
  const std::optional<BudgetGuard> guard(std::in_place, remat::BudgetOptions{.bytes = 300'000});
  chain(x).sum().backward();
  CHECK(lines_with(small.event_log(), "budget of").size() == 1);
  CHECK_THAT(small.to_html(), contains(">budget: "));
}

TEST_CASE("a step without evictions leaves the report as it is", "[recorder][budget]") {
  const Tensor x = leaf({100, 100});
  const Recorder recorder;
  const BudgetGuard guard({.bytes = std::numeric_limits<int64_t>::max()});
  chain(x).sum().backward();
  CHECK(recorder.report().evictions.empty());
  CHECK_THAT(recorder.report().to_string(), contains("no region ran"));
}

TEST_CASE("recorders show what a budget moves and reads back", "[recorder][budget][moving]") {
  const Folder folder;
  std::vector<float> numbers(100 * 100, 0.25F);
  const Tensor weight = leaf({100, 100}), memory = at::from_blob(numbers.data(), {100, 100});
  const Recorder recorder;
  remat::BudgetOptions options{.bytes = 6 * value_bytes, .min_bytes = 0};
  options.moving = remat::MoveOptions{.directory = folder.path(), .min_bytes = 0};
  const BudgetGuard guard(options);
  Tensor x = memory + 1;
  for (int64_t i = 0; i < depth; ++i) x = x * weight + memory;  // runs never again
  x.sum().backward();
  const int64_t moves = guard.report().moves;
  REQUIRE(moves > 0);
  const std::vector<EvictionReport> sums = recorder.report().evictions;
  REQUIRE(sums.size() == 1);
  CHECK(sums[0].op == "sources");
  CHECK(sums[0].moves == moves);
  CHECK(sums[0].bytes_moved == moves * value_bytes);
  CHECK(sums[0].evictions == 0);
  const std::string log = recorder.event_log();
  CHECK(static_cast<int64_t>(
            lines_with(log, "budget moves away 40000 bytes of sources, ").size()) == moves);
  CHECK(!lines_with(log, "budget reads back 40000 bytes, ").empty());
  CHECK_THAT(recorder.report().to_string(), contains("were moved instead of dropped"));
  CHECK_THAT(recorder.report().to_json(), contains("\"bytes_moved\": "));
  CHECK_THAT(recorder.to_html(), contains("moved"));
}

TEST_CASE("saved_tensors lists the same bytes within a budget as without", "[report][budget]") {
  const Tensor x = leaf({100, 100}), weight = leaf({100, 100});
  const auto loss = [&] { return x.mm(weight).tanh().mm(weight.t()).tanh().sum(); };
  const auto held_bytes = [](const Tensor& root) {
    int64_t bytes = 0;
    for (const auto& each : remat::saved_tensors(root))
      bytes += each.shares_storage ? 0 : each.bytes;
    return bytes;
  };
  const int64_t plain = held_bytes(loss());
  const BudgetGuard guard({.bytes = std::numeric_limits<int64_t>::max()});
  CHECK(plain == 4 * value_bytes);
  CHECK(held_bytes(loss()) == plain);
}
