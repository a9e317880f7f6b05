// A model cut over two devices of the stand-in: micro-batches in a pipeline, each part a region.

#include "tests/device/stand_in.h"
#include "tests/support/support.h"

using remat::checkpoint;
using remat::DeviceReport;
using remat::MemoryMeter;

namespace {

constexpr int64_t width = 64, rows = 16, num_micro_batches = 4;
constexpr int64_t batch_bytes = 4 * rows * width;

/// Two parts of layers, each on a device of its own, or both on the CPU.
class Model {
 public:
  /// Makes the same numbers on any device.
  Model(at::Device first, at::Device second) {
    at::manual_seed(11);
    for (std::size_t part = 0; part < 2; ++part)
      for (int i = 0; i < 3; ++i)
        weights_[part].push_back(
            at::randn({width, width}).div_(8).to(part == 0 ? first : second).requires_grad_());
  }
  Tensor run(std::size_t part, Tensor x) const {
    for (const Tensor& weight : weights_[part]) x = x.mm(weight).tanh();
    return x;
  }
  at::Device device(std::size_t part) const { return weights_[part][0].device(); }
  Tensors gradients() const {
    Tensors all;
    for (const Tensors& part : weights_)
      for (const Tensor& each : part) all.push_back(each.grad().cpu());
    return all;
  }
  /// Allocates the gradients, so that no step does.
  void make_gradients() {
    for (const Tensors& part : weights_)
      for (const Tensor& each : part) each.mutable_grad() = at::zeros_like(each);
  }

 private:
  std::array<Tensors, 2> weights_;
};

/// Runs all forwards, then all backwards, the last one first. Tensors that wait between the two are
/// the memory of a pipeline.
void step(const Model& model, const Tensors& batches, bool has_regions) {
  const auto part = [&](std::size_t index, const Tensor& x) {
    const auto run = [&model, index](const Tensor& t) { return model.run(index, t); };
    if (!has_regions) return run(x);
    return checkpoint({.name = index == 0 ? "first part" : "second part"}, run, x);
  };
  Tensors losses;
  for (const Tensor& batch : batches)
    losses.push_back(part(1, part(0, batch).to(model.device(1))).sum());
  while (!losses.empty()) {
    losses.back().backward();
    losses.pop_back();
  }
}

}  // namespace

TEST_CASE("a pipeline over two devices: gradients, bytes and times of each", "[device][pipeline]") {
  const at::Device first = stand_in::device(0), second = stand_in::device(1);
  Model near(at::kCPU, at::kCPU), model(first, second);
  Tensors batches, batches_there;
  for (int64_t i = 0; i < num_micro_batches; ++i) {
    batches.push_back(at::randn({rows, width}));
    batches_there.push_back(batches.back().to(first));
  }
  step(near, batches, /*has_regions=*/false);
  model.make_gradients();
  stand_in::live_bytes();

  MemoryMeter here(first), there(second);
  const int64_t before_here = here.live_bytes(), before_there = there.live_bytes();
  step(model, batches_there, /*has_regions=*/false);
  stand_in::live_bytes();
  const int64_t plain_here = here.peak_bytes() - before_here;
  const int64_t plain_there = there.peak_bytes() - before_there;
  require_bit_equal(model.gradients(), near.gradients());

  model.make_gradients();
  stand_in::live_bytes();
  {
    const remat::Recorder recorder;
    here.reset_peak();
    there.reset_peak();
    step(model, batches_there, /*has_regions=*/true);
    stand_in::live_bytes();
    require_bit_equal(model.gradients(), near.gradients());

    // Between the passes the first device holds only the batches from before, and its results until
    // they are copied; the second holds the copies.
    const int64_t peak_here = here.peak_bytes() - before_here;
    const int64_t peak_there = there.peak_bytes() - before_there;
    CHECK(plain_here - peak_here >= (num_micro_batches - 1) * 3 * batch_bytes);
    CHECK(plain_there - peak_there >= (num_micro_batches - 1) * 2 * batch_bytes);
    CHECK(peak_there >= num_micro_batches * batch_bytes);

    const remat::Report report = recorder.report();
    REQUIRE(report.devices.size() == 2);
    for (const DeviceReport& each : report.devices)
      CHECK(each.peak_bytes == (each.device == first ? here : there).peak_bytes());
    REQUIRE(report.regions.size() == 2);
    for (const remat::RegionReport& each : report.regions) {
      CHECK(each.calls == num_micro_batches);
      CHECK(each.recomputes == num_micro_batches);
      CHECK(each.bytes_inputs == num_micro_batches * batch_bytes);
      CHECK(each.device_forward_s > 0);
      CHECK(each.device_recompute_s > 0);
    }
    // Every run is on its own device's timeline only.
    const std::string page = recorder.to_html();
    const auto count = [&](const std::string& part) {
      int64_t found = 0;
      for (size_t at = page.find(part); at != std::string::npos; at = page.find(part, at + 1))
        ++found;
      return found;
    };
    for (const char* const run : {"forward", "recompute"}) {
      CHECK(count("first part " + std::string(run) + " on far:0") == num_micro_batches);
      CHECK(count("second part " + std::string(run) + " on far:1") == num_micro_batches);
      CHECK(count("first part " + std::string(run) + " on far:1") == 0);
      CHECK(count("second part " + std::string(run) + " on far:0") == 0);
    }
  }
}
