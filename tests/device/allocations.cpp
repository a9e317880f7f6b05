// remat/allocations.h on the stand-in, whose allocator reports each allocation, rounded to 512
// bytes.

#include "remat/allocations.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "tests/device/stand_in.h"
#include "tests/support/far_tensors.h"
#include "tests/support/files.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::RecordAllocationsGuard;
using remat::Recorder;
using remat::testing::Folder;
using remat::testing::text_in;

namespace {

using namespace torch::profiler::impl;

/// The lines of a log about allocations.
std::vector<std::string> told(const Recorder& recorder) {
  std::vector<std::string> lines;
  std::stringstream log(recorder.event_log());
  for (std::string line; std::getline(log, line);)
    if (line.find(" bytes on far:") != std::string::npos) lines.push_back(line);
  return lines;
}
int64_t count(const std::vector<std::string>& lines, const std::string& part) {
  return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
    return line.find(part) != std::string::npos;
  });
}

/// LibTorch's own profiler of this thread, with memory.
class Profiler {
 public:
  Profiler() {
    const ProfilerConfig config(ProfilerState::KINETO, false, /*profile_memory=*/true);
    torch::autograd::profiler::prepareProfiler(config, {ActivityType::CPU});
    torch::autograd::profiler::enableProfiler(config, {ActivityType::CPU});
  }
  ~Profiler() { end(); }
  Profiler& operator=(Profiler&&) = delete;
  /// Returns how often it received memory of the stand-in.
  int64_t end() {
    if (!is_on_) return 0;
    is_on_ = false;
    int64_t count = 0;
    const auto result = torch::autograd::profiler::disableProfiler();
    for (const auto& event : result->events())
      count += event.name() == "[memory]" && event.deviceType() == at::kPrivateUse1 ? 1 : 0;
    return count;
  }

 private:
  bool is_on_ = true;
};

}  // namespace

TEST_CASE("a recorder gets each allocation of a device in the sizes of its allocator",
          "[device][allocations]") {
  const Tensor before = bytes_on(0, 100);
  stand_in::live_bytes();
  const int64_t rounded = stand_in::rounded_bytes(0);
  const Recorder recorder;
  {
    const RecordAllocationsGuard guard;
    const Tensor first = bytes_on(0, 513);
    const Tensor other = bytes_on(1, 1);
    {
      const Tensor second = bytes_on(0, 512);
    }
  }
  const Tensor after = bytes_on(0, 100);
  const std::vector<std::string> lines = told(recorder);
  REQUIRE(lines.size() == 6);
  const auto alive = [&](int64_t more) { return std::to_string(rounded + more) + " alive"; };
  CHECK(lines[0] == "allocates 1024 bytes on far:0, " + alive(1024));
  CHECK_THAT(lines[1], contains("allocates 512 bytes on far:1"));
  CHECK(lines[2] == "allocates 512 bytes on far:0, " + alive(1536));
  CHECK(lines[3] == "frees 512 bytes on far:0, " + alive(1024));
  CHECK_THAT(lines[4], contains("frees 512 bytes on far:1"));
  CHECK(lines[5] == "frees 1024 bytes on far:0, " + alive(0));
}

TEST_CASE("allocations have their region, in forward and on the threads of backward",
          "[device][allocations]") {
  const Tensor x = leaf_on(0, {1000});
  const auto f = [](const Tensor& t) { return t.sin().exp().sin(); };
  const Recorder recorder;
  Tensor y;
  {
    const RecordAllocationsGuard guard;
    y = checkpoint({.name = "r"}, f, x);
    const std::vector<std::string> forward = told(recorder);
    // Three results, two of which die in the region; 4000 bytes take 4096.
    CHECK(count(forward, "region 1 allocates 4096 bytes on far:0") == 3);
    CHECK(count(forward, "region 1 frees 4096 bytes on far:0") == 2);
    CHECK(forward.size() == 5);
    const Tensor one = at::ones_like(y);
    const std::size_t before = told(recorder).size();
    torch::autograd::backward({y}, {one});
    const std::vector<std::string> all = told(recorder);
    const std::vector<std::string> backward(all.begin() + static_cast<std::ptrdiff_t>(before),
                                            all.end());
    CHECK(count(backward, "region 1 allocates 4096 bytes on far:0") >= 2);  // recomputed
    CHECK(count(backward, "allocates 4096 bytes on far:0") >
          count(backward, "region 1 allocates 4096 bytes on far:0"));  // gradients
  }
  stand_in::live_bytes();
  const std::size_t now = told(recorder).size();
  const Tensor later = bytes_on(0, 1);
  y.sum().sin();
  CHECK(told(recorder).size() == now);  // the guard has ended, also for its backwards' threads
}

TEST_CASE("pictures and traces show what the allocator has given out", "[device][allocations]") {
  const Tensor x = leaf_on(0, {5000});
  const Recorder recorder;
  const std::string without = recorder.to_html();
  CHECK_THAT(without, !contains("given out by the allocator"));
  {
    const RecordAllocationsGuard guard;
    checkpoint({.name = "r"}, [](const Tensor& t) { return t.sin().sin(); }, x).sum().backward();
  }
  CHECK_THAT(recorder.to_html(), contains("line: given out by the allocator, in its sizes"));
  const Folder folder;
  recorder.write_chrome_trace(folder.path() + "/trace.json");
  const std::string text = text_in(folder.path() + "/trace.json");
  CHECK_THAT(text, contains("\"allocates on far:0\",\"cat\":\"allocation\",\"ph\":\"i\""));
  CHECK_THAT(text, contains("\"bytes\":20480,\"region\":1,\"name\":\"r\""));
  CHECK_THAT(text, contains("\"allocated on far:0\",\"ph\":\"C\""));
}

TEST_CASE("an allocation that fails while they are recorded tells what was asked for",
          "[device][allocations]") {
  const Tensor x = leaf_on(0, {1000});
  stand_in::live_bytes();
  struct Small {
    Small() { stand_in::set_total_bytes(1 << 20); }
    ~Small() { stand_in::set_total_bytes(stand_in::default_total_bytes); }
  } const small;
  const Recorder recorder;
  const RecordAllocationsGuard guard;
  {
    const remat::MemoryMeter meter(stand_in::device(0));
    const remat::MemoryLimitGuard limit(meter.live_bytes() + 2000, stand_in::device(0));
    CHECK_THROWS_AS(checkpoint(
                        {.name = "r"}, [](const Tensor& t) { return t.sin(); }, x),
                    c10::OutOfMemoryError);
    bytes_on(0, 100);
  }
  const auto failed = recorder.report().failed_allocations;
  REQUIRE(failed.size() == 1);
  CHECK(failed[0].asked_bytes == 4000);
  CHECK(failed[0].held.at(0).region == "r");
  // Memory held by the limit is not an allocation of the program.
  for (const std::string& line : told(recorder)) {
    const std::string words = "cates ";
    const auto at = line.find(words);
    if (at != std::string::npos) CHECK(std::stoll(line.substr(at + words.size())) <= 4096);
  }
}

TEST_CASE("guards of allocations nest, and end their own effect only", "[device][allocations]") {
  const Recorder recorder;
  auto first = std::make_unique<RecordAllocationsGuard>();
  auto second = std::make_unique<RecordAllocationsGuard>();
  bytes_on(0, 1);
  CHECK(told(recorder).size() == 2);  // once each
  SECTION("in order") {
    second.reset();
    bytes_on(0, 1);
    CHECK(told(recorder).size() == 4);
    first.reset();
  }
  SECTION("out of order") {
    first.reset();
    bytes_on(0, 1);
    CHECK(told(recorder).size() == 4);
    second.reset();
  }
  SECTION("on another thread") {
    std::thread([&] {
      second.reset();
      first.reset();
    }).join();
  }
  bytes_on(0, 1);
  CHECK(told(recorder).size() <= 4);
  const RecordAllocationsGuard third;
  const std::size_t before = told(recorder).size();
  bytes_on(0, 1);
  CHECK(told(recorder).size() == before + 2);
}

TEST_CASE("several threads' allocations are recorded, each thread's by its own guard",
          "[device][allocations]") {
  const Recorder recorder;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([i] {
      if (i == 3) {
        for (int round = 0; round < 50; ++round) bytes_on(0, 7000);
        return;
      }
      const RecordAllocationsGuard guard;
      for (int round = 0; round < 50; ++round) bytes_on(i % 2, 1000 * (i + 1));
    });
  for (std::thread& each : threads) each.join();
  const std::vector<std::string> lines = told(recorder);
  CHECK(lines.size() == 3 * 2 * 50);
  CHECK(count(lines, "allocates 1024 bytes on far:0") == 50);
  CHECK(count(lines, "allocates 2048 bytes on far:1") == 50);
  CHECK(count(lines, "frees 3072 bytes on far:0") == 50);
  CHECK(count(lines, " 7168 bytes") == 0);
}

TEST_CASE("without a recorder of memory nothing is recorded", "[device][allocations]") {
  const RecordAllocationsGuard guard;
  bytes_on(0, 1);
  const Recorder recorder({.memory = false});
  bytes_on(0, 1);
  CHECK(told(recorder).empty());
  Recorder stopped;
  stopped.stop();
  bytes_on(0, 1);
  CHECK(told(stopped).empty());
}

TEST_CASE("LibTorch's profiler and a guard of allocations do not disturb each other",
          "[device][allocations]") {
  const Recorder recorder;
  SECTION("one that runs keeps its allocations") {
    Profiler profiler;
    const auto error = error_of<CheckpointError>([] { RecordAllocationsGuard guard; });
    CHECK(error.kind() == CheckpointError::Kind::Unsupported);
    CHECK_THAT(error.what(), contains("LibTorch's profiler runs"));
    bytes_on(0, 1).add(1);
    CHECK(profiler.end() >= 2);
    CHECK(told(recorder).empty());
  }
  SECTION("one that would start meanwhile says why it does not") {
    const RecordAllocationsGuard guard;
    CHECK_FALSE(torch::profiler::impl::profilerEnabled());
    const ProfilerConfig config(ProfilerState::KINETO);
    CHECK_THROWS_WITH(torch::autograd::profiler::enableProfiler(config, {ActivityType::CPU}),
                      contains("Profiler is already enabled on this thread"));
    bytes_on(0, 1).add(1);
    CHECK(told(recorder).size() >= 4);
  }
  SECTION("another thread's is its own") {
    const RecordAllocationsGuard guard;
    int64_t of_profiler = 0;
    std::thread([&] {
      Profiler profiler;
      bytes_on(0, 1).add(1);
      of_profiler = profiler.end();
    }).join();
    CHECK(of_profiler >= 2);
    CHECK(told(recorder).empty());
  }
  // One after the other: the guard after the profiler.
  Profiler after;
  bytes_on(0, 1);
  CHECK(after.end() >= 2);
  const RecordAllocationsGuard guard;
  const std::size_t before = told(recorder).size();
  bytes_on(0, 1);
  CHECK(told(recorder).size() == before + 2);
}
