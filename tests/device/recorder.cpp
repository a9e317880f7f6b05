// Recorder on the stand-in: bytes and time of each device, copies of offload, allocations that
// fail.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "remat/allocations.h"
#include "tests/device/stand_in.h"
#include "tests/support/far_faults.h"
#include "tests/support/far_tensors.h"
#include "tests/support/files.h"
#include "tests/support/functions.h"
#include "tests/support/reports.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::DeviceReport;
using remat::FailedAllocation;
using remat::Recorder;
using remat::RegionReport;
using remat::Report;

namespace {

constexpr std::chrono::milliseconds work_time(20);

/// Gives each kernel and copy of the device this time.
struct SlowDevice {
  SlowDevice() { stand_in::set_work_time(work_time); }
  ~SlowDevice() { stand_in::set_work_time(std::chrono::nanoseconds(0)); }
};

DeviceReport device(const Report& report, int index) {
  for (const DeviceReport& each : report.devices)
    if (each.device == stand_in::device(index)) return each;
  FAIL("no device " << index);
  return {};
}

std::string written(const Recorder& recorder,
                    void (Recorder::*write)(const std::filesystem::path&) const) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("remat-device-" + std::to_string(::getpid()) + ".txt");
  (recorder.*write)(path);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  return text.str();
}

}  // namespace

TEST_CASE("a recorder takes the device's time, and waits for it only when asked",
          "[device][recorder]") {
  const Tensor x = leaf_on(0, {1000});
  const SlowDevice slow;
  const int64_t waits_before = stand_in::num_waits();
  const Recorder recorder;
  CHECK(stand_in::num_waits() > waits_before);  // its clock is set when the device is idle
  const int64_t waits = stand_in::num_waits();
  checkpoint({.name = "r"}, two_sins, x).sum().backward();
  CHECK(stand_in::num_waits() == waits);
  const Report report = recorder.report();
  CHECK(stand_in::num_waits() > waits);
  const double each = std::chrono::duration<double>(work_time).count();
  const RegionReport& r = region(report, "r");
  // Forward has two kernels. The recompute stops when the second sin has saved its input.
  CHECK(r.device_forward_s >= 2 * each);
  CHECK(r.device_forward_s < 2 * each + r.forward_s + 0.001);
  CHECK(r.device_recompute_s >= each);
  CHECK(r.device_recompute_s < 2 * each + r.recompute_s + 0.001);
  CHECK(r.forward_s > 0);
  CHECK(recorder.report().regions[0].device_forward_s == r.device_forward_s);  // added once
}

TEST_CASE("what regions keep is told of each device", "[device][recorder]") {
  const Tensor x = leaf_on(0, {300}) * 1, y = leaf_on(1, {2000}) * 1;
  const Recorder recorder;
  const Tensor of_x = checkpoint({.name = "x"}, two_sins, x);
  const Tensor of_y = checkpoint({.name = "y"}, two_sins, y);
  const std::string trace = written(recorder, &Recorder::write_chrome_trace);
  CHECK(occurrences(trace, "\"inputs kept\":1200,") > 0);
  CHECK(occurrences(trace, "\"inputs kept\":8000,") > 0);
  CHECK(occurrences(trace, "\"inputs kept\":9200,") == 0);
}

TEST_CASE("a recompute is timed on the stream that forward ran on", "[device][recorder]") {
  const Tensor x = leaf_on(0, {1000});
  const Recorder recorder;
  Tensor y;
  {
    const stand_in::OnStream other(stand_in::stream(0, 7));
    y = checkpoint({.name = "r"}, two_sins, x);
  }
  y.sum().backward();
  const std::string trace = written(recorder, &Recorder::write_chrome_trace);
  CHECK(occurrences(trace, "\"r\",\"cat\":\"forward, device\",\"ph\":\"X\"") == 1);
  CHECK(occurrences(trace, "\"r (recompute)\",\"cat\":\"recompute, device\"") == 1);
  CHECK(occurrences(trace, "\"pid\":2,\"tid\":7") == 2);
  CHECK(occurrences(trace,
                    "\"process_name\",\"ph\":\"M\",\"pid\":2,\"args\":{\"name\":\"far:0\"}") == 1);
}

TEST_CASE("without times of the device, or without the wish, a recorder has none",
          "[device][recorder]") {
  const Tensor x = leaf_on(0, {10});
  const Recorder recorder({.device_time = false});
  checkpoint({.name = "r"}, two_sins, x).sum().backward();
  CHECK(region(recorder.report(), "r").device_forward_s == 0);
  CHECK(region(recorder.report(), "r").device_recompute_s == 0);
  CHECK_THAT(recorder.report().to_string(), !contains("forward ms, device"));

  struct Capture {
    Capture() { stand_in::set_capturing(true); }
    ~Capture() { stand_in::set_capturing(false); }
  };
  const Recorder captured;
  {
    const Capture capture;
    checkpoint({.name = "captured", .preserve_rng_state = false}, two_sins, x);
  }
  CHECK(region(captured.report(), "captured").calls == 1);
  CHECK(region(captured.report(), "captured").device_forward_s == 0);
}

TEST_CASE("a recorder's peak of a device is the meter's, of each device its own",
          "[device][recorder]") {
  const Tensor x = leaf_on(0, {5000}), there = leaf_on(1, {300});
  remat::MemoryMeter first(stand_in::device(0)), second(stand_in::device(1));
  const auto f = [](const Tensor& t) { return t.sin().cos().sin(); };
  {
    const Recorder recorder;
    first.reset_peak();
    second.reset_peak();
    checkpoint({.name = "here"}, f, x).sum().backward();
    checkpoint({.name = "there"}, f, there).sum().backward();
    const Report report = recorder.report();
    CHECK(device(report, 0).peak_bytes == first.peak_bytes());
    CHECK(device(report, 1).peak_bytes == second.peak_bytes());
    CHECK(first.peak_bytes() > second.peak_bytes());
    CHECK(device(report, 0).is_exact);
    CHECK_THAT(report.to_string(), contains("far:0: at most "));
    CHECK_THAT(report.to_json(), contains("\"device\": \"far:1\",\n      \"is_exact\": true,"));
  }
  stand_in::live_bytes();
}

TEST_CASE("each device has a picture, with kinds and the bars of its streams",
          "[device][recorder]") {
  const Tensor x = leaf_on(0, {50'000}), w = leaf_on(0, {50'000}), there = leaf_on(1, {50'000});
  const Recorder recorder;
  checkpoint(
      {.name = "<r>"}, [&](const Tensor& t) { return (t * w).sin().exp(); }, x)
      .sum()
      .backward();
  checkpoint({.name = "s"}, two_sins, there).sum().backward();
  const std::string page = written(recorder, &Recorder::write_html);
  CHECK(occurrences(page, "<svg") == 3);
  CHECK_THAT(page, contains("Live bytes of CPU tensors over time"));
  CHECK_THAT(page, contains("Live bytes of tensors on far:0 over time"));
  CHECK_THAT(page, contains("Live bytes of tensors on far:1 over time"));
  CHECK(occurrences(page, "&lt;r&gt; forward on far:0: ") == 1);
  CHECK(occurrences(page, "&lt;r&gt; recompute on far:0: ") == 1);
  CHECK(occurrences(page, "s recompute on far:1: ") == 1);
  CHECK(occurrences(page, "s recompute on far:0: ") == 0);
  CHECK_THAT(page, contains("inputs kept: 200.0 kB"));
  CHECK_THAT(page, contains("parameters that regions use: 200.0 kB"));
  CHECK_THAT(page, contains("recomputed: 200.0 kB"));
  CHECK_THAT(page, contains("forward ms, device"));
  const std::string picture = written(recorder, &Recorder::write_memory_svg);
  CHECK(occurrences(picture, "<svg") == 4);  // one around the three
  CHECK_THAT(written(recorder, &Recorder::write_chrome_trace),
             contains("\"live bytes of far:1\",\"ph\":\"C\""));
}

TEST_CASE("the copies of offload are bars of their own streams", "[device][recorder]") {
  const Tensor x = leaf_on(0, {1000});
  const SlowDevice slow;
  const Recorder recorder;
  const Tensor h = x.exp();
  const Tensor y = checkpoint({.name = "r", .offload_inputs = true}, two_sins, h);
  y.sum().backward();
  const DeviceReport report = device(recorder.report(), 0);
  CHECK(report.bytes_out == 4000);
  CHECK(report.bytes_in == 4000);
  const double each = std::chrono::duration<double>(work_time).count();
  CHECK(report.copies_out_s >= each);
  CHECK(report.copies_in_s >= each);
  CHECK_THAT(recorder.report().to_string(), contains("copied to the host 4000 B in "));
  const std::string page = recorder.to_html();
  CHECK(occurrences(page, "copy to the host 4000 B on far:0: ") == 1);
  CHECK(occurrences(page, "copy from the host 4000 B on far:0: ") == 1);
  CHECK_THAT(page, contains("copies of offload"));
  CHECK(region(recorder.report(), "r").bytes_inputs == 0);  // none stayed
}

TEST_CASE("what was alive when an allocation of a device failed is told by region and kind",
          "[device][recorder]") {
  const Tensor x = leaf_on(0, {1000}), w = leaf_on(0, {1000});
  stand_in::live_bytes();
  const SmallDevice small(1 << 20);
  const Recorder recorder;
  const Tensor h = x.exp();
  const Tensor y = checkpoint({.name = "a"}, [&](const Tensor& t) { return (t * w).sin(); }, h);
  const Tensor z = checkpoint(
      {.name = "b", .policy = remat::save_ops({"aten::exp"})},
      [](const Tensor& t) { return t.exp().sin(); }, y);
  const remat::MemoryMeter meter(stand_in::device(0));
  const int64_t live = meter.live_bytes();
  {
    const remat::MemoryLimitGuard limit(live + 2000, stand_in::device(0));
    CHECK_THROWS_AS(checkpoint({.name = "c"}, two_sins, z), c10::OutOfMemoryError);
  }
  const Report report = recorder.report();
  REQUIRE(report.failed_allocations.size() == 1);
  const FailedAllocation& failed = report.failed_allocations[0];
  CHECK(failed.device == stand_in::device(0));
  CHECK(failed.asked_bytes == -1);
  CHECK(failed.live_bytes == live);
  CHECK(failed.parameters_bytes == 4000);
  REQUIRE(failed.held.size() == 3);
  CHECK(failed.held[0].region == "b");
  CHECK(failed.held[0].inputs_bytes == 4000);
  CHECK(failed.held[0].saved_bytes == 4000);
  CHECK(failed.held[1].region == "a");
  CHECK(failed.held[1].regions == 1);
  CHECK(failed.held[1].inputs_bytes == 4000);
  CHECK(failed.held[2].region == "c");
  CHECK(failed.held[2].inputs_bytes == 4000);
  CHECK_THAT(report.to_string(), contains("An allocation did not fit on far:0 beside "));
  CHECK_THAT(report.to_string(),
             contains("b (1 of them): inputs 4000 B, saved 4000 B, recomputed 0 B"));
  CHECK_THAT(report.to_json(), contains("\"region\": \"b\",\n          \"regions\": 1"));
}

TEST_CASE("an allocation that fails in a recompute finds recomputed bytes", "[device][recorder]") {
  const Tensor x = leaf_on(0, {1000});
  const Recorder recorder;
  const Tensor y =
      checkpoint({.name = "r"}, [](const Tensor& t) { return t.sin().sin().sin().sin(); }, x);
  const Tensor one = at::ones_like(y);
  stand_in::live_bytes();
  const SmallDevice small(1 << 20);
  {
    const remat::MemoryMeter meter(stand_in::device(0));
    const remat::MemoryLimitGuard limit(meter.live_bytes() + 2 * 4096, stand_in::device(0));
    CHECK_THROWS_AS(y.backward(one), c10::OutOfMemoryError);
  }
  const Report report = recorder.report();
  REQUIRE(report.failed_allocations.size() == 1);
  REQUIRE(report.failed_allocations[0].held.size() == 1);
  // Slots of the first three inputs: the region's input and two results, of which the last does not
  // exist yet.
  CHECK(report.failed_allocations[0].held[0].recomputed_bytes == 3 * 4000);
  CHECK(report.failed_allocations[0].held[0].inputs_bytes == 4000);
}

TEST_CASE("LibTorch's memory history of a device has the regions' names around their allocations",
          "[device][recorder]") {
  const bool of_all_threads = GENERATE(false, true);
  const Tensor x = leaf_on(0, {1000});
  const Tensor one = at::ones_like(x);
  const stand_in::History history(of_all_threads);
  // Counts the results of 4,000 bytes between each begin and end of that scope.
  const auto allocations_in = [&](const std::string& name) {
    std::vector<int64_t> counts;
    bool is_inside = false;
    for (const std::string& entry : history.entries()) {
      if (entry == "START " + name) is_inside = true, counts.push_back(0);
      if (entry == "END " + name) is_inside = false;
      if (is_inside && entry == "allocates 4096") ++counts.back();
    }
    return counts;
  };
  const auto three = [](const Tensor& t) { return t.sin().sin().sin(); };
  const Tensor y = checkpoint({.name = "layer"}, three, x);
  CHECK(allocations_in("layer (forward)") == std::vector<int64_t>{3});
  CHECK(allocations_in("layer").empty());
  const Tensor z = checkpoint(three, y);
  const int64_t kernels = stand_in::num_kernels("aten::sin");
  z.backward(one);
  CHECK(allocations_in("layer (forward)") == std::vector<int64_t>{3});
  CHECK(allocations_in("remat::checkpoint (forward)") == std::vector<int64_t>{3});
  // On the device's thread of the engine: the results of kernels in each recompute.
  const int64_t again = stand_in::num_kernels("aten::sin") - kernels;
  CHECK(again >= 4);
  CHECK(allocations_in("layer") == std::vector<int64_t>{again / 2});
  CHECK(allocations_in("remat::checkpoint") == std::vector<int64_t>{again / 2});
}

// Not a test by itself: tests/page_test.py runs it and opens its page.
TEST_CASE("a page of two devices", "[.][page]") {
  const char* const path = std::getenv("REMAT_TEST_PAGE");
  REQUIRE(path != nullptr);
  const Tensor first = leaf_on(0, {50'000}), second = leaf_on(1, {50'000});
  const SlowDevice slow;
  const Recorder recorder;
  const remat::RecordAllocationsGuard allocations;
  for (const Tensor& x : {first, second})
    checkpoint({.name = "block", .offload_inputs = true}, two_sins, x.exp()).sum().backward();
  recorder.write_html(path);
}
