// Recorder: sums per region, the order of events, and the files it writes.

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/support/files.h"
#include "tests/support/functions.h"
#include "tests/support/reports.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::Recorder;
using remat::RegionReport;

namespace {

std::filesystem::path in_temporary_folder(const std::string& name) {
  return std::filesystem::temp_directory_path() /
         ("remat-" + std::to_string(::getpid()) + "-" + name);
}

}  // namespace

TEST_CASE("a recorder sums calls, recomputes, stops and bytes by region name",
          "[report][recorder]") {
  const Tensor x = leaf({100'000});
  const Recorder recorder;
  Tensor y = checkpoint({.name = "a"}, two_sins, x);
  y = checkpoint(
      {.name = "b", .early_stop = false}, [](const Tensor& t) { return t.exp().exp(); }, y);
  y = checkpoint({.name = "a"}, two_sins, y);
  const RegionReport before = region(recorder, "a");
  CHECK(before.calls == 2);
  CHECK(before.recomputes == 0);
  // sin saves its input: the region's own, which stays, and one that is dropped.
  CHECK(before.bytes_dropped == 2 * 400'000);
  CHECK(before.bytes_inputs == 2 * 400'000);
  CHECK(before.bytes_saved == 0);
  y.sum().backward();
  const RegionReport a = region(recorder, "a"), b = region(recorder, "b");
  CHECK(a.recomputes == 2);
  CHECK(a.early_stops == 2);
  CHECK(a.bytes_recompute_peak == 2 * 400'000);
  CHECK(b.recomputes == 1);
  CHECK(b.early_stops == 0);
  CHECK(b.bytes_dropped == 2 * 400'000);  // both results of exp
  CHECK(a.forward_s > 0);
  CHECK(a.recompute_s > 0);
  CHECK(a.offloaded == 0);
  CHECK(a.offload_fallbacks == 0);
}

TEST_CASE("the inputs of nested regions are not kept, and a policy's results are counted",
          "[report][recorder]") {
  const Tensor x = leaf({32, 32});
  const Recorder recorder;
  const auto inner = [](const Tensor& t) { return checkpoint({.name = "inner"}, two_sins, t); };
  const Tensor y =
      checkpoint({.name = "outer"}, [&](const Tensor& t) { return inner(t.exp()); }, x);
  CHECK(region(recorder, "outer").bytes_inputs == 4096);
  CHECK(region(recorder, "inner").bytes_inputs == 0);
  const Tensor z = checkpoint(
      {.name = "kept", .policy = remat::save_matmuls()},
      [](const Tensor& t) { return t.mm(t).exp().sin(); }, x);
  CHECK(region(recorder, "kept").bytes_saved == 4096);
  (y.sum() + z.sum()).backward();
  CHECK(region(recorder, "outer").recomputes == 1);
  // The outer recompute ends with the inner region's input: that region does not run again in it.
  CHECK(region(recorder, "inner").calls == 1);
  CHECK(region(recorder, "inner").recomputes == 1);
}

TEST_CASE("what a call returns beside its first result is dropped under a policy of names, too",
          "[report][recorder]") {
  const Tensor x = leaf({100, 10});
  const auto f = [](const Tensor& t) {
    const auto [largest, place] = t.exp().max(1);
    return largest.sin();
  };
  const Recorder recorder;
  checkpoint({.name = "plain"}, f, x);
  checkpoint({.name = "names", .policy = remat::save_names({"another"})}, f, x);
  CHECK(region(recorder, "plain").bytes_dropped == 4000 + 800 + 400);  // exp, places, largest
  CHECK(region(recorder, "names").bytes_dropped == 4000 + 800 + 400);
}

TEST_CASE("the event log tells what happened in order", "[report][recorder]") {
  const Tensor x = leaf({2, 3});
  const Recorder recorder;
  const auto cos_of_sin = [](const Tensor& t) { return t.sin().cos(); };
  checkpoint({.name = "one"}, cos_of_sin, x).sum().backward();
  CHECK_THROWS(checkpoint(
      {.name = "two"}, [](const Tensor&) -> Tensor { throw std::runtime_error("no"); }, x));
  CHECK(recorder.event_log() ==
        "region 1 \"one\" begins, depth 1, keeps 24 bytes of inputs\n"
        "region 1 drops 0: Float[2, 3] on cpu\n"
        "region 1 drops 1: Float[2, 3] on cpu\n"
        "region 1 ends, 2 slots\n"
        "region 1 recompute begins\n"
        "region 1 fills 0\n"
        "region 1 fills 1\n"
        "region 1 recompute ends\n"
        "region 1 reads 1\n"
        "region 1 reads 0\n"
        "region 2 \"two\" begins, depth 1, keeps 24 bytes of inputs\n"
        "region 2 throws\n");
}

TEST_CASE("a recorder sees whole regions only, and nothing when it is gone", "[report][recorder]") {
  const Tensor x = leaf({4});
  const Tensor before = checkpoint({.name = "before"}, two_sins, x);
  std::optional<Recorder> recorder(std::in_place);
  before.sum().backward();
  CHECK(recorder->report().regions.empty());
  const Tensor during = checkpoint({.name = "during"}, two_sins, x);
  const Recorder second;
  during.sum().backward();
  CHECK(region(*recorder, "during").recomputes == 1);
  CHECK(region(second, "during").recomputes == 1);
  CHECK(region(second, "during").calls == 0);
  recorder.reset();
  checkpoint({.name = "after"}, two_sins, x).sum().backward();
  CHECK(region(second, "after").calls == 1);
}

TEST_CASE("a recorder that was stopped keeps what it has", "[report][recorder]") {
  const Tensor x = leaf({10});
  Recorder recorder({.operators = true});
  checkpoint({.name = "seen"}, two_sins, x).sum().backward();
  recorder.stop();
  recorder.stop();
  checkpoint({.name = "unseen"}, two_sins, x).sum().backward();
  REQUIRE(recorder.report().regions.size() == 1);
  CHECK(region(recorder, "seen").recomputes == 1);
  CHECK(occurrences(recorder.event_log(), "seen") > 0);
  CHECK(occurrences(recorder.to_html(), "unseen") == 0);
  // Another one may begin, and ends on its own.
  const Recorder next;
  checkpoint({.name = "again"}, two_sins, x);
  CHECK(region(next, "again").calls == 1);
  CHECK(recorder.report().regions.size() == 1);
}

TEST_CASE("with too many events the oldest go, and the sums stay exact", "[report][recorder]") {
  const Tensor x = leaf({4});
  const Recorder recorder({.memory = false, .max_events = 10});
  for (int i = 0; i < 20; ++i) checkpoint({.name = "r"}, two_sins, x).sum().backward();
  CHECK(region(recorder, "r").calls == 20);
  CHECK(region(recorder, "r").recomputes == 20);
  const auto report = recorder.report();
  CHECK(report.dropped_events == 20 * 10 - 10);
  CHECK_THAT(report.to_string(), contains("The oldest 190 events are gone"));
  CHECK_THAT(recorder.event_log(), contains("(190 older events are gone)"));
  const auto error = error_of<c10::ValueError>([] { Recorder none({.max_events = 0}); });
  CHECK_THAT(text_of(error), contains("max_events was 0"));
}

TEST_CASE("reports print as a table and as JSON", "[report][recorder]") {
  const Tensor x = leaf({1000});
  const Recorder recorder;
  checkpoint({.name = "block \"3\""}, two_sins, x).sum().backward();
  checkpoint(two_sins, x);
  const std::string table = recorder.report().to_string();
  CHECK_THAT(table, contains("region"));
  CHECK_THAT(table, contains("block \"3\""));
  CHECK_THAT(table, contains("(no name)"));
  CHECK_THAT(table, contains("4000 B"));
  const std::string json = recorder.report().to_json();
  CHECK_THAT(
      json,
      contains("\"name\": \"block \\\"3\\\"\",\n      \"calls\": 1,\n      \"recomputes\": 1"));
  CHECK_THAT(json, contains("\"dropped_events\": 0\n}"));
  CHECK_THAT(remat::Report{}.to_string(), contains("no region ran"));
}

TEST_CASE("names that are not UTF-8 are so in reports, logs and files", "[report][recorder]") {
  const Tensor x = leaf({10'000});
  const auto trace = in_temporary_folder("odd_trace.json");
  const auto svg = in_temporary_folder("odd_memory.svg");
  const auto page = in_temporary_folder("odd_page.html");
  struct Name {
    std::string given, shown;
  };
  // The second bytes of E0, ED, F0 and F4 are limited: no other spelling, no surrogate, nothing
  // above 10FFFF.
  for (const auto& [given, shown] : std::initializer_list<Name>{
           {"Schl\xFCssel", "Schl\uFFFDssel"},
           {"z\u00E4h \u20AC \U0001F600", "z\u00E4h \u20AC \U0001F600"},
           {"cut \xE2\x82", "cut \uFFFD"},
           {"cut \xF0\x9F\x98?", "cut \uFFFD?"},
           {"\xC0\xAF \xE0\x9F\xBF", "\uFFFD\uFFFD \uFFFD\uFFFD\uFFFD"},
           {"\xED\xA0\x80 \xF4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD \uFFFD\uFFFD\uFFFD\uFFFD"},
           {"\xF5 \x80 \uFFFE", "\uFFFD \uFFFD \uFFFD"}}) {
    const Recorder recorder;
    checkpoint({.name = given}, two_sins, x).sum().backward();
    recorder.write_chrome_trace(trace);
    recorder.write_memory_svg(svg);
    recorder.write_html(page);
    for (const std::string& text :
         {recorder.report().to_json(), recorder.report().to_string(), recorder.event_log(),
          text_in(trace), text_in(svg), text_in(page)}) {
      CHECK_THAT(text, contains(shown));
      if (given != shown) CHECK(occurrences(text, given) == 0);
    }
  }
  for (const auto& path : {trace, svg, page}) std::filesystem::remove(path);
}

TEST_CASE("the files of a recorder hold every region, and say when they cannot be written",
          "[report][recorder]") {
  const Tensor x = leaf({10'000});
  const Recorder recorder({.operators = true});
  for (int i = 0; i < 3; ++i) checkpoint({.name = "<block> & more"}, two_sins, x).sum().backward();

  const auto trace = in_temporary_folder("trace.json");
  recorder.write_chrome_trace(trace);
  const std::string slices = text_in(trace);
  CHECK(occurrences(slices, "\"<block> & more\",\"cat\":\"forward\",\"ph\":\"X\"") == 3);
  CHECK(occurrences(slices, "\"<block> & more (recompute)\"") == 3);
  CHECK(occurrences(slices, "\"name\":\"aten::sin\"") >= 9);
  CHECK(occurrences(slices, "\"ph\":\"C\"") > 6);
  CHECK(occurrences(slices, "\"live\":0,") == 0);  // an operator says no bytes

  const auto svg = in_temporary_folder("memory.svg");
  recorder.write_memory_svg(svg);
  const std::string picture = text_in(svg);
  CHECK(occurrences(picture, "&lt;block&gt; &amp; more forward") == 3);
  CHECK(occurrences(picture, "&lt;block&gt; &amp; more recompute") == 3);
  CHECK(occurrences(picture, "<svg") == 1);

  const auto page = in_temporary_folder("page.html");
  recorder.write_html(page);
  const std::string html = text_in(page);
  CHECK(occurrences(html, "<td>&lt;block&gt; &amp; more</td>") == 1);
  CHECK(occurrences(html, "<script") == 0);
  CHECK(occurrences(html, "src=") == 0);

  for (const auto& path : {trace, svg, page}) std::filesystem::remove(path);
  const auto nowhere = in_temporary_folder("no-such-folder") / "page.html";
  CHECK_THAT(text_of(error_of<c10::Error>([&] { recorder.write_html(nowhere); })),
             contains("could not be written"));
}

TEST_CASE("live bytes are sampled by kind", "[report][recorder]") {
  const Tensor x = leaf({50'000}), w = leaf({50'000});
  const Recorder recorder;
  const auto page = in_temporary_folder("kinds.svg");
  {
    const Tensor y =
        checkpoint({.name = "r"}, [&](const Tensor& t) { return (t * w).sin().exp(); }, x);
    y.sum().backward();
  }
  recorder.write_memory_svg(page);
  const std::string picture = text_in(page);
  std::filesystem::remove(page);
  CHECK_THAT(picture, contains("inputs kept: 200.0 kB"));
  CHECK_THAT(picture, contains("parameters that regions use: 200.0 kB"));
  CHECK_THAT(picture, contains("recomputed: "));
}

TEST_CASE("what was alive when an allocation met a limit is told by region and kind",
          "[report][recorder]") {
  const Tensor x = leaf({1000}), w = leaf({1000});
  const Recorder recorder;
  const Tensor y =
      checkpoint({.name = "kept"}, [&](const Tensor& t) { return (t * w).sin(); }, x.exp());
  const remat::MemoryMeter meter;
  const int64_t live = meter.live_bytes();
  {
    const remat::MemoryLimitGuard limit(live + 3999);
    CHECK_THROWS_AS(y.sin(), c10::OutOfMemoryError);
  }
  const auto report = recorder.report();
  REQUIRE(report.failed_allocations.size() == 1);
  const remat::FailedAllocation& failed = report.failed_allocations[0];
  CHECK(failed.device == at::kCPU);
  CHECK(failed.asked_bytes == 4000);
  CHECK(failed.live_bytes == live);
  CHECK(failed.parameters_bytes == 4000);
  REQUIRE(failed.held.size() == 1);
  CHECK(failed.held[0].region == "kept");
  CHECK(failed.held[0].inputs_bytes == 4000);
  CHECK(failed.held[0].recomputed_bytes == 0);
  CHECK(report.devices.empty());
  CHECK_THAT(report.to_string(), contains("An allocation of 4000 B did not fit on cpu beside "));
  CHECK_THAT(report.to_json(), contains("\"device\": \"cpu\",\n      \"asked_bytes\": 4000"));
}

TEST_CASE("what was recomputed and never read is not told of as recomputed", "[report][recorder]") {
  const Tensor x = leaf({1000}), w = leaf({1000});
  const Recorder recorder;
  const Tensor y = checkpoint(
      {.name = "half read"}, [](const Tensor& a, const Tensor& b) { return a.exp() * b.exp(); }, x,
      w);
  grad_of(y, {x}, {.retain_graph = true});
  const remat::MemoryMeter meter;
  {
    const remat::MemoryLimitGuard limit(meter.live_bytes() + 3999);
    CHECK_THROWS_AS(y.sin(), c10::OutOfMemoryError);
  }
  const auto failed = recorder.report().failed_allocations;
  REQUIRE(failed.size() == 1);
  REQUIRE(failed[0].held.size() == 1);
  CHECK(failed[0].held[0].inputs_bytes == 8000);
  CHECK(failed[0].held[0].recomputed_bytes == 0);
}

TEST_CASE("each recorder sees the parameters, and the first sixteen failed allocations",
          "[report][recorder]") {
  const Tensor x = leaf({1000}), w = leaf({1000});
  for (int i = 0; i < 2; ++i) {
    const Recorder recorder;
    const Tensor y = checkpoint([&](const Tensor& t) { return (t * w).sin(); }, x.exp());
    const remat::MemoryMeter meter;
    const remat::MemoryLimitGuard limit(meter.live_bytes() + 3999);
    for (int j = 0; j < 20; ++j) CHECK_THROWS_AS(y.sin(), c10::OutOfMemoryError);
    const auto failed = recorder.report().failed_allocations;
    CHECK(failed.size() == 16);
    for (const remat::FailedAllocation& each : failed) CHECK(each.parameters_bytes == 4000);
  }
}

TEST_CASE("what was read ahead of backward is not waited for", "[report][recorder]") {
  constexpr int64_t length = 8, bytes = 1 << 20;
  const Folder folder;
  const Tensor x = leaf({bytes / 4});
  const Recorder recorder;
  const auto read_bytes = [&] { return recorder.report().files.bytes_read; };
  Tensor y = x + 1;
  {
    const remat::SaveOnDiskGuard guard({.directory = folder.path(), .prefetch_depth = 1});
    for (int64_t i = 0; i < length; ++i) {
      y = y.sin();
      if (i + 1 == length) continue;
      y.register_hook([&, i](const Tensor&) {  // a read is under way
        for (int tries = 0; tries < 1000 && read_bytes() < (length - i) * bytes; ++tries)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      });
    }
  }
  const int64_t waits = recorder.report().files.waits;  // for the writes
  grad_of(y, {x});
  CHECK(read_bytes() == length * bytes);
  CHECK(recorder.report().files.waits - waits <= 2);  // for the first, which nobody had begun
}

TEST_CASE("the picture leaves out what is there all the time, and names the regions",
          "[report][recorder]") {
  const Tensor x = leaf({50'000});
  const auto picture_of_a_step = [&] {
    const auto path = in_temporary_folder("step.svg");
    const Recorder recorder;
    checkpoint({.name = "<r>"}, [](const Tensor& t) { return t.sin().exp(); }, x).sum().backward();
    recorder.write_memory_svg(path);
    const std::string picture = text_in(path);
    std::filesystem::remove(path);
    return picture;
  };
  picture_of_a_step();  // from now on x has a gradient
  const std::string alone = picture_of_a_step();
  const Tensor beside = at::zeros({25'000'000});
  const std::string with_beside = picture_of_a_step();
  CHECK_THAT(with_beside, contains("not drawn: 100."));
  CHECK_THAT(alone, !contains("not drawn: 100."));
  // So the axis has the same numbers.
  const auto axis_of = [](const std::string& picture) {
    const std::string end = "text-anchor=\"end\">";
    std::vector<std::string> numbers;
    for (size_t at = picture.find(end); at != std::string::npos; at = picture.find(end, at + 1)) {
      const size_t from = at + end.size();
      const std::string number = picture.substr(from, picture.find('<', from) - from);
      if (number.find("not drawn") == std::string::npos) numbers.push_back(number);
    }
    return numbers;
  };
  CHECK(axis_of(alone).size() >= 3);
  CHECK(axis_of(alone) == axis_of(with_beside));
  // Forward and recompute, unless one had so little of the time that there is no room for a name.
  std::string named = with_beside;
  for (int i = 0; i < 50 && occurrences(named, ">&lt;r&gt;</text>") < 2; ++i)
    named = picture_of_a_step();
  CHECK(occurrences(named, ">&lt;r&gt;</text>") == 2);
}

TEST_CASE("regions of several threads are recorded", "[report][recorder]") {
  const Recorder recorder;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      const Tensor x = leaf({64});
      for (int i = 0; i < 25; ++i)
        checkpoint({.name = "thread " + std::to_string(t)}, two_sins, x).sum().backward();
    });
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t) {
    CHECK(region(recorder, "thread " + std::to_string(t)).calls == 25);
    CHECK(region(recorder, "thread " + std::to_string(t)).recomputes == 25);
  }
}

// ---- saved_tensors ---------------------------------------------------------------------------

TEST_CASE("saved_tensors lists what a graph holds, and starts no recompute", "[report]") {
  const Tensor x = leaf({2, 3});
  const Counted done;
  const Tensor plain = x.exp();                                      // its result
  const Tensor shared = plain * plain.view({2, 3});                  // one storage, seen before
  const Tensor y = checkpoint({.name = "block"}, two_sins, shared);  // two inputs of sin
  const Tensor z = y.sum();                                          // nothing
  const LiveBytes bytes;
  const auto infos = remat::saved_tensors(z);
  CHECK(bytes.held() == 0);
  CHECK(done.now().recomputes == 0);
  std::string text;
  int64_t held = 0;
  for (const auto& info : infos) {
    text += info.node + (info.dropped ? " dropped by " + info.region : "") +
            (info.shares_storage ? " shares" : "") + " " + std::to_string(info.bytes) + "\n";
    CHECK(info.sizes == std::vector<int64_t>{2, 3});
    CHECK(info.dtype == at::kFloat);
    if (!info.dropped && !info.shares_storage) held += info.bytes;
  }
  CHECK(text ==
        "SinBackward0 dropped by block 24\n"
        "SinBackward0 dropped by block 24\n"
        "MulBackward0 24\n"
        "MulBackward0 shares 24\n"
        "ExpBackward0 shares 24\n");
  CHECK(held == 24);
  z.backward();  // the look changed nothing
  CHECK(bit_equal(x.grad(), grad_of(two_sins(x.exp() * x.exp()), {x})[0]));
  CHECK(remat::saved_tensors(x).empty());
  CHECK(remat::saved_tensors(Tensor()).empty());
}

TEST_CASE("saved_tensors lists tensors without a storage", "[report]") {
  const Tensor sparse = at::eye(3).to_sparse(), x = leaf({3, 2});
  const Tensor y = checkpoint(two_sins, at::mm(sparse, x));
  const auto infos = remat::saved_tensors(y);
  REQUIRE(infos.size() == 3);
  CHECK(infos[0].dropped);
  CHECK(infos[2].sizes == std::vector<int64_t>{3, 3});
  CHECK(infos[2].bytes == 0);  // of a storage that it does not have
  y.sum().backward();
  CHECK(x.grad().defined());
}

TEST_CASE("saved_tensors lists a number that a region's node saves besides", "[report]") {
  // LibTorch shows hooks no tensor that stands for a number.
  const Tensor x = leaf({3}), number = at::scalar_tensor(2.);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  const Tensor y =
      checkpoint({.name = "block"}, [&](const Tensor& t) { return at::xlogy(t, number); }, x);
  const auto infos = remat::saved_tensors(y);
  REQUIRE(infos.size() == 2);
  CHECK(infos[0].sizes.empty());
  CHECK(infos[0].bytes == static_cast<int64_t>(number.nbytes()));
  CHECK(infos[1].dropped);
  CHECK(infos[1].sizes == std::vector<int64_t>{3});
}

TEST_CASE("saved_tensors knows custom Functions and the program's own hooks", "[report]") {
  struct Twice : torch::autograd::Function<Twice> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& t) {
      context->save_for_backward({t});
      return t * 2;
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list grads) {
      return {grads[0] * 2 + 0 * context->get_saved_variables()[0]};
    }
  };
  const Tensor x = leaf({5});
  Calls unpacks;
  const Tensor a = Twice::apply(x.exp());
  std::optional<remat::SavedTensorHooksGuard> hooks;
  hooks.emplace([](const Tensor& t) { return t.clone(); },
                [&](const Tensor& t) {
                  unpacks();
                  return t;
                });
  const Tensor y = a.sin();
  hooks.reset();
  const auto infos = remat::saved_tensors(y);
  REQUIRE(infos.size() == 3);
  CHECK(infos[0].node == "SinBackward0");
  CHECK(infos[0].sizes.empty());
  CHECK_THAT(infos[1].node, contains("Twice"));
  CHECK(infos[1].bytes == 20);
  CHECK(infos[2].node == "ExpBackward0");
  CHECK(infos[2].shares_storage);
  CHECK(unpacks.count() == 0);
  y.sum().backward();
  CHECK(unpacks.count() == 1);
}
