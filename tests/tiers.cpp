// Tiers of the CPU: what stays, what goes to the file and in which order, what backward holds, and
// what goes wrong.

#include "remat/tiers.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "remat/memory.h"
#include "remat/policy.h"
#include "remat/report.h"
#include "tests/support/files.h"
#include "tests/support/functions.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/warnings.h"

using remat::checkpoint;
using remat::SaveInTiersGuard;
using remat::SaveInTiersOptions;
using remat::TierCounters;

namespace {

constexpr int64_t mebibyte = 1 << 20;
constexpr int64_t num_elements = mebibyte / 4;
constexpr int length = 12;

/// Until what the library writes beside the program is written.
void wait_for_bytes_on_disk(const TierCounters& counters, int64_t bytes) {
  for (int i = 0; i < 5000 && counters.now().bytes_on_disk != bytes; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(counters.now().bytes_on_disk == bytes);
}

int64_t num_threads() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("Threads:", 0) == 0) return std::stoll(line.substr(8));
  return -1;
}

struct Forward {
  Tensor y;
  TierCounters counters;
};

/// `f(x)` under a guard with so many MiB.
template <class F>
Forward forward_in_tiers(const Folder& folder, int64_t mebibytes, F&& f, const Tensor& x) {
  const SaveInTiersGuard guard({.host_bytes = mebibytes * mebibyte, .directory = folder.path()});
  Tensor y = f(x);
  return {std::move(y), guard.counters()};
}

}  // namespace

TEST_CASE("within its budget nothing moves", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const Tensors plain = grad_of(sines(x, length), {x});
  const auto [y, counters] =
      forward_in_tiers(folder, length, [](Tensor t) { return sines(t, length); }, x);
  require_bit_equal(grad_of(y, {x}), plain);
  CHECK(counters.now().bytes_to_disk == 0);
  CHECK(counters.now().loads == 0);
}

TEST_CASE("memory holds the budget, and the file the rest: what was saved first", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const Tensors plain = grad_of(sines(x, length), {x});
  const int64_t budget = GENERATE(0, 1, 3, 8);
  const remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  {
    const auto [y, counters] =
        forward_in_tiers(folder, budget, [](Tensor t) { return sines(t, length); }, x);
    // The input is held by the test, the output by y and saved by nobody.
    const int64_t num_moved = length - 1 - budget;
    wait_for_bytes_on_disk(counters, num_moved * mebibyte);
    CHECK(meter.live_bytes() - before == (budget + 1) * mebibyte);
    CHECK(counters.now().bytes_to_disk == num_moved * mebibyte);
    require_bit_equal(grad_of(y, {x}), plain);
    // Each came back once, and what stayed never went: the newest stayed.
    CHECK(counters.now().loads == num_moved);
    CHECK(counters.now().bytes_loaded == num_moved * mebibyte);
  }
  CHECK(meter.live_bytes() == before);
}

TEST_CASE("backward brings back no more than there is room for", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const int64_t budget = GENERATE(0, 2, 4);
  const auto [y, counters] =
      forward_in_tiers(folder, budget, [](Tensor t) { return sines(t, 32); }, x);
  wait_for_bytes_on_disk(counters, (31 - budget) * mebibyte);
  remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  const Tensor gradient = grad_of(y, {x})[0];
  // A node has its gradient, what it is computed from, cos of that, and the result; the meter began
  // with the budget full, and one load may run ahead where there is no room.
  CHECK(meter.peak_bytes() - before <= (4 + (budget == 0 ? 2 : 1)) * mebibyte);
}

TEST_CASE("one thread of the library writes what moves, however much it is", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const auto run = [&] {
    const auto [y, counters] =
        forward_in_tiers(folder, 0, [](Tensor t) { return sines(t, length); }, x);
    wait_for_bytes_on_disk(counters, (length - 1) * mebibyte);
    static_cast<void>(grad_of(y, {x}));
  };
  run();  // starts it
  const int64_t before = num_threads();
  for (int i = 0; i < 3; ++i) run();
  CHECK(num_threads() == before);
}

TEST_CASE("the last saves stay in memory, also beyond the budget", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const Tensors plain = grad_of(sines(x, length), {x});
  const int64_t budget = GENERATE(0, 2, 5), keep_last = GENERATE(0, 1, 4, 100);
  CAPTURE(budget, keep_last);
  const remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  {
    Tensor y;
    std::optional<TierCounters> counters;
    {
      const SaveInTiersGuard guard(
          {.host_bytes = budget * mebibyte, .directory = folder.path(), .keep_last = keep_last});
      counters = guard.counters();
      y = sines(x, length);
    }
    const int64_t num_staying = std::min<int64_t>(length - 1, std::max(budget, keep_last));
    wait_for_bytes_on_disk(*counters, (length - 1 - num_staying) * mebibyte);
    CHECK(meter.live_bytes() - before == (num_staying + 1) * mebibyte);
    require_bit_equal(grad_of(y, {x}), plain);
    CHECK(counters->now().loads == length - 1 - num_staying);
  }
  CHECK(meter.live_bytes() == before);
  CHECK_THROWS_AS(SaveInTiersGuard({.keep_last = -1}), c10::ValueError);
}

TEST_CASE("what the program holds does not move", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  Tensors held;
  const auto keep_all = [&](Tensor t) {
    for (int i = 0; i < length; ++i) held.push_back(t = t.sin());
    return t;
  };
  const auto [y, counters] = forward_in_tiers(folder, 0, keep_all, x);
  CHECK(counters.now().bytes_to_disk == 0);
  require_bit_equal(grad_of(y, {x}), grad_of(sines(x, length), {x}));
}

TEST_CASE("what the program has let go of moves with the next save", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const auto hold_for_a_while = [&](Tensor t) {
    Tensors held;
    for (int i = 0; i < 6; ++i) held.push_back(t = t.sin());
    held.clear();
    return sines(t, 2);
  };
  const auto [y, counters] = forward_in_tiers(folder, 0, hold_for_a_while, x);
  wait_for_bytes_on_disk(counters, 7 * mebibyte);
  require_bit_equal(grad_of(y, {x}), grad_of(sines(x, 8), {x}));
}

TEST_CASE("a storage counts once, and all views of it move together", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const auto views = [](const Tensor& t) {
    const Tensor once = t * 2;
    const Tensor low = once.narrow(0, 0, num_elements / 2);
    const Tensor high = once.narrow(0, num_elements / 2, num_elements / 2);
    return (low.sin() * high.sin() + once.view({2, -1}).cos().sum(0)).sum();
  };
  const Tensors plain = grad_of(views(x), {x});
  const int64_t budget = GENERATE(0, 3);
  const auto [y, counters] = forward_in_tiers(folder, budget, views, x);
  require_bit_equal(grad_of(y, {x}), plain);
  if (budget == 3) CHECK(counters.now().bytes_to_disk == 0);
  // once, and low.sin(), high.sin().
  if (budget == 0) CHECK(counters.now().bytes_to_disk <= 2 * mebibyte);
}

TEST_CASE("gradients in tiers are plain ones, with regions, again and of second order", "[tiers]") {
  const Folder folder;
  const int64_t budget = GENERATE(0, 2, 100);
  const Tensor w = leaf({64, 64});
  const auto block = [](const Tensor& t, const Tensor& weight) {
    return at::gelu(at::linear(t, weight)).sin() + t;
  };
  const auto in_regions = [&](const Tensor& t, bool with_regions, bool has_policy) {
    Tensor y = t;
    for (int i = 0; i < 4; ++i) {
      const auto inner = [&block](const Tensor& a, const Tensor& b) { return block(a, b); };
      if (!with_regions)
        y = inner(y, w);
      else if (has_policy)
        y = checkpoint({.policy = remat::save_ops({"aten::mm", "aten::addmm"})}, inner, y, w);
      else
        y = checkpoint(
            [inner](const Tensor& a, const Tensor& b) { return checkpoint(inner, a, b); }, y, w);
    }
    return y;
  };
  const Tensor x = leaf({256, 64});
  const auto second_order = [&](const Tensor& y) {
    const Tensor g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({g.square().sum()}, {x, w}, {}, true);
  };
  const Tensor plain = in_regions(x, false, false);
  const Tensors first = grad_of(plain, {x, w}, {.retain_graph = true});
  const Tensors second = second_order(plain);
  const auto options =
      SaveInTiersOptions{.host_bytes = budget * 1024, .directory = folder.path(), .min_bytes = 0};
  Tensor y;
  {
    const SaveInTiersGuard guard(options);
    y = in_regions(x, true, GENERATE(false, true));
  }
  for (int i = 0; i < 3; ++i) require_bit_equal(grad_of(y, {x, w}, {.retain_graph = true}), first);
  require_bit_equal(second_order(y), second);
  require_bit_equal(grad_of(y, {x, w}), first);
}

TEST_CASE("several threads save in tiers and read from them", "[tiers][threads]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const Tensors plain = grad_of(sines(x, length), {x});
  std::vector<Tensors> found(4);
  std::vector<std::thread> threads;
  for (Tensors& each : found)
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        const auto [y, counters] =
            forward_in_tiers(folder, i % 3, [](Tensor t) { return sines(t, length); }, x);
        each = grad_of(y, {x});
      }
    });
  for (std::thread& each : threads) each.join();
  for (const Tensors& each : found) require_bit_equal(each, plain);
}

TEST_CASE("a saved tensor that is changed in place raises, wherever it is", "[tiers]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const int64_t budget = GENERATE(0, 1, 100);
  const int which = GENERATE(0, 3, 5);
  const SaveInTiersOptions options{.host_bytes = budget * mebibyte, .directory = folder.path()};
  Tensor y = x;
  {
    const SaveInTiersGuard guard(options);
    Tensor changed;
    for (int i = 0; i < 6; ++i) {
      const Tensor next = y.sin();
      if (i == which) changed = next.detach();  // shares the version
      y = next.cos();
    }
    changed.zero_();
  }
  CHECK_THAT(text_of(error_of<c10::Error>([&] { grad_of(y, {x}); })),
             contains("modified by an inplace operation"));
}

TEST_CASE("what does not fit on the disk stays in memory, with a warning", "[tiers][faults]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const Tensors plain = grad_of(sines(x, length), {x});
  Tensors found;
  int64_t num_failed = 0;
  std::string texts;
  {
    const Warnings warnings;
    const FileSizeLimit limit(4 * mebibyte);
    const auto [y, counters] =
        forward_in_tiers(folder, 0, [](Tensor t) { return sines(t, length); }, x);
    // A write that has not begun when backward asks is left out.
    for (int i = 0; i < 1000 && counters.now().failed_writes == 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    found = grad_of(y, {x}, {.retain_graph = true});
    require_bit_equal(grad_of(y, {x}), found);
    num_failed = counters.now().failed_writes;
    for (const std::string& each : warnings.texts) texts += each;
  }
  require_bit_equal(found, plain);
  CHECK(num_failed > 0);
  CHECK_THAT(texts, contains("stays in memory, beyond the budget of its tier"));
  CHECK_THAT(texts, contains("could not be written to a file"));
}

TEST_CASE("a forward that throws leaves nothing behind", "[tiers][faults]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const remat::MemoryMeter meter;
  const int64_t before = meter.live_bytes();
  CHECK_THROWS_AS(forward_in_tiers(
                      folder, 1,
                      [](Tensor t) -> Tensor {
                        t = sines(t, length);
                        throw std::runtime_error("stop");
                      },
                      x),
                  std::runtime_error);
  for (int i = 0; i < 1000 && meter.live_bytes() != before; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(meter.live_bytes() == before);
}

TEST_CASE("a child of a fork reads what its parent saved in tiers", "[tiers]") {
  // Backward itself LibTorch refuses there.
  const Folder folder;
  const SaveInTiersOptions options{.host_bytes = mebibyte, .directory = folder.path()};
  Tensors expected;
  for (int i = 0; i < 6; ++i) expected.push_back(leaf({num_elements}) * 2);
  const auto save = [&] {
    std::vector<torch::autograd::SavedVariable> saved;
    const SaveInTiersGuard guard(options);
    for (const Tensor& each : expected) saved.emplace_back(each * 1, false);
    return saved;
  };
  const auto saved = save();
  const auto are_right = [&](const std::vector<torch::autograd::SavedVariable>& all) {
    for (std::size_t i = 0; i < all.size(); ++i)
      if (!bit_equal(all[i].unpack(), expected[i])) return false;
    return true;
  };
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    bool is_right = false;
    try {
      is_right = are_right(saved);
#ifndef __SANITIZE_THREAD__  // it allows no threads there
      is_right = is_right && are_right(save());
#endif
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(is_right ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(are_right(saved));
}

namespace {

/// Two saves of one tensor of which the second may not move with the first, as its operator may yet
/// write to it; it moves when the guard ends.
struct SavedTwice {
  explicit SavedTwice(const SaveInTiersOptions& options) : guard(std::in_place, options) {
    counters.emplace(guard->counters());
    Tensor t = at::rand({num_elements});
    memory = t.mutable_data_ptr<float>();
    expected = t.clone();
    first = torch::autograd::SavedVariable(t, false);
    static_cast<void>(leaf({4}) * 2);  // another operator
    second = torch::autograd::SavedVariable(t, false);
    t.reset();
    third = torch::autograd::SavedVariable(at::rand({num_elements}), false);  // there is no room
  }
  /// Past all versions, and while the thread that writes the file reads, as a program's own kernel
  /// would.
  [[gnu::no_sanitize_thread]] void write(int64_t element) {
    memory[element] = 7;
    expected.mutable_data_ptr<float>()[element] = 7;
  }
  std::optional<SaveInTiersGuard> guard;
  std::optional<TierCounters> counters;
  float* memory = nullptr;
  Tensor expected;
  torch::autograd::SavedVariable first, second, third;
};

}  // namespace

TEST_CASE("a second save that moves later is compared with what was written", "[tiers]") {
  const Folder folder;
  // In the first, the last and a middle part of what is compared at once; -1: nowhere.
  const int64_t element = GENERATE(int64_t{-1}, int64_t{0}, num_elements / 2 + 5, num_elements - 1);
  CAPTURE(element);
  SavedTwice saved({.host_bytes = 0, .directory = folder.path()});
  wait_for_bytes_on_disk(*saved.counters, mebibyte);
  if (element >= 0) saved.write(element);
  saved.guard.reset();
  wait_for_bytes_on_disk(*saved.counters, (element < 0 ? 2 : 3) * mebibyte);
  CHECK(bit_equal(saved.second.unpack(), saved.expected));
  if (element < 0) CHECK(saved.first.unpack().is_alias_of(saved.second.unpack()));
  if (element >= 0) CHECK_FALSE(bit_equal(saved.first.unpack(), saved.expected));
}

TEST_CASE("a second save has its own values, whatever the writer has done by then", "[tiers]") {
  const Folder folder;
  const SaveInTiersOptions options{.host_bytes = 0, .directory = folder.path()};
  for (int i = 0; i < 40; ++i) {
    SavedTwice saved(options);
    if (i % 4 > 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * (i % 4)));
    saved.write(num_elements - 1 - i);
    saved.guard.reset();
    if (i % 2 > 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
    REQUIRE(bit_equal(saved.second.unpack(), saved.expected));
  }
}

TEST_CASE("a second save of what could not be written stays with it", "[tiers][faults]") {
  const Folder folder;
  const Warnings warnings;
  const FileSizeLimit limit(1000);
  SavedTwice saved({.host_bytes = 0, .directory = folder.path()});
  for (int i = 0; i < 1000 && saved.counters->now().failed_writes == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  saved.write(3);
  saved.guard.reset();
  CHECK(bit_equal(saved.second.unpack(), saved.expected));
  CHECK(saved.counters->now().bytes_to_disk == 0);
}

TEST_CASE("a child of a fork compares a second save with what its parent wrote", "[tiers]") {
  const Folder folder;
  SavedTwice saved({.host_bytes = 0, .directory = folder.path()});
  const bool is_written = GENERATE(false, true);
  if (is_written) wait_for_bytes_on_disk(*saved.counters, mebibyte);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    bool is_right = false;
    try {
      saved.write(5);
#ifndef __SANITIZE_THREAD__  // it allows no threads there
      saved.guard.reset();
#endif
      is_right = bit_equal(saved.second.unpack(), saved.expected);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    ::_exit(is_right ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  saved.guard.reset();
  CHECK(bit_equal(saved.second.unpack(), saved.expected));
}

TEST_CASE("what moves at once is neither written nor looked at twice", "[tiers][recorder]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const remat::Recorder recorder;
  const auto f = [](Tensor t) {
    for (int i = 0; i < 4; ++i) t = t.exp().sin();  // exp saves its result, sin its input
    return t;
  };
  const auto [y, counters] = forward_in_tiers(folder, 0, f, x);
  wait_for_bytes_on_disk(counters, 4 * mebibyte);
  CHECK(counters.now().bytes_to_disk == 4 * mebibyte);
  CHECK(recorder.report().files.waits == 0);
  require_bit_equal(grad_of(y, {x}), grad_of(f(x), {x}));
}

TEST_CASE("options of tiers that are wrong are refused", "[tiers]") {
  const auto refused = [](const SaveInTiersOptions& options) {
    return text_of(error_of<c10::ValueError>([&] { const SaveInTiersGuard guard(options); }));
  };
  CHECK_THAT(refused({.device_bytes = -1}), contains("device_bytes is -1"));
  CHECK_THAT(refused({.host_bytes = -5, .directory = "/tmp"}), contains("host_bytes is -5"));
  CHECK_THAT(refused({.min_bytes = -1}), contains("min_bytes is -1"));
  CHECK_THAT(refused({.host_bytes = 10}),
             contains("there is no directory for tensors beyond that"));
  CHECK_THAT(refused({.directory = "/does/not/exist"}),
             contains("SaveInTiersGuard: no file could be made"));
}

TEST_CASE("a recorder sees what tiers write, read and wait for", "[tiers][recorder]") {
  const Folder folder;
  const Tensor x = leaf({num_elements});
  const Tensors plain = grad_of(sines(x, length), {x});
  const remat::Recorder recorder({.memory = GENERATE(true, false)});
  const auto [y, counters] = forward_in_tiers(
      folder, 3,
      [](Tensor t) { return checkpoint([](Tensor u) { return u.cos(); }, sines(t, length)); }, x);
  wait_for_bytes_on_disk(counters, (length - 3) * mebibyte);
  const remat::FileReport before = recorder.report().files;
  CHECK(before.bytes_written == counters.now().bytes_to_disk);
  CHECK(before.bytes_read == 0);
  CHECK(before.write_s > 0);
  y.sum().backward();
  const remat::Report report = recorder.report();
  CHECK(report.files.bytes_written == counters.now().bytes_to_disk);
  CHECK(report.files.bytes_read == counters.now().bytes_loaded);
  CHECK(report.files.read_s > 0);
  // Held up: what was waited for, and what was read by the program's own thread because nobody else
  // had begun.
  CHECK(report.files.waits <= counters.now().waits);
  CHECK(report.files.waited_s <= counters.now().seconds_waited);
  CHECK(occurrences(recorder.event_log(), "writes 1048576 bytes to a file") == length - 3);
  CHECK(occurrences(recorder.event_log(), "reads 1048576 bytes from a file") == length - 3);
  CHECK(occurrences(recorder.to_html(), "write to a file: 1048.6 kB") == length - 3);
  CHECK(occurrences(report.to_string(), "Files: written 9437.2 kB") == 1);
  CHECK(occurrences(report.to_json(), "\"bytes_written\": 9437184,\n    \"bytes_read\": 9437184") ==
        1);
  const std::filesystem::path trace = folder.path() + "/trace.json";
  recorder.write_chrome_trace(trace);
  CHECK(occurrences(text_in(trace), "\"read from a file\"") == length - 3);
}
