// Stores saved tensors compressed until backward: a place of the program's own, in one file.
//
// A small convolutional net saves tensors that compress well: results of ReLU that are half zeros,
// the indices of max pooling, a dropout mask. `Compress` compresses each of them with zstd when it
// is saved, and decompresses it when backward reads it. `CompressBeside` does the same on threads
// of its own: it compresses while forward continues, and decompresses before backward asks.
//
// The program prints the bytes in memory after forward, and the time of forward and backward. It
// compares a run without a guard, both places, and SaveOnDiskGuard, which take turns. The ratio is
// of medians, to SaveOnDiskGuard.
//
// Exit status: 0 if all gradients are bit-equal (on the CPU) and the compressed tensors take less
// than 60 % of the bytes, else 1.

#include <remat/remat.h>
#include <torch/torch.h>
#include <zstd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "command_line.h"
#include "target.h"

namespace {

constexpr const char* kUsage =
    "usage: save_compressed [--device NAME] [--dtype NAME]\n" REMAT_TARGET_USAGE;

constexpr int level = 1, num_rounds = 9;

size_t checked(size_t result) {
  if (ZSTD_isError(result)) throw std::runtime_error(ZSTD_getErrorName(result));
  return result;
}

// Returns the compressed bytes. A device's tensor is copied to the host first.
torch::Tensor compressed(const torch::Tensor& flat) {
  const torch::Tensor near = flat.cpu();
  const auto size = static_cast<size_t>(near.numel());
  std::vector<char> room(ZSTD_compressBound(size));
  const size_t used =
      checked(ZSTD_compress(room.data(), room.size(), near.const_data_ptr(), size, level));
  torch::Tensor packed = torch::empty({static_cast<int64_t>(used)}, torch::kByte);
  std::memcpy(packed.mutable_data_ptr(), room.data(), used);
  return packed;
}

torch::Tensor decompressed(const torch::Tensor& packed, int64_t size) {
  torch::Tensor flat = torch::empty({size}, torch::kByte);
  checked(ZSTD_decompress(flat.mutable_data_ptr(), static_cast<size_t>(size),
                          packed.const_data_ptr(), packed.nbytes()));
  return flat;
}

// ---- compressed when begin_store returns, decompressed in finish_load

class Packed final : public remat::StoredContents {
 public:
  Packed(torch::Tensor packed, const torch::Tensor& flat)
      : packed_(std::move(packed)), size_(flat.numel()), device_(flat.device()) {}
  torch::Tensor finish_load() override { return decompressed(packed_, size_).to(device_); }

 private:
  const torch::Tensor packed_;
  const int64_t size_;  // [bytes]
  const torch::Device device_;
};

class Compress final : public remat::Place {
 public:
  std::shared_ptr<remat::StoredContents> begin_store(const torch::Tensor& flat) override {
    torch::Tensor packed = compressed(flat);
    if (packed.numel() > flat.numel() / 10 * 9) return nullptr;  // gains nothing: it stays
    return std::make_shared<Packed>(std::move(packed), flat);
  }
};

// ---- the same, on threads beside the program

class PackedBeside final : public remat::StoredContents {
 public:
  explicit PackedBeside(torch::Tensor flat)
      : size_(flat.numel()),
        device_(flat.device()),
        packed_(std::async(
            std::launch::async, [done = all_done(flat.device()), flat = std::move(flat)]() mutable {
              if (done) done->synchronize();               // the saver's stream computes the tensor
              return compressed(std::exchange(flat, {}));  // the original may be freed after it
            })) {}
  bool is_stored_late() const override { return true; }
  void finish_store() override { packed_.get(); }
  void begin_load() override {
    loaded_ = std::async(std::launch::async, [this] { return decompressed(packed_.get(), size_); });
  }
  torch::Tensor finish_load() override {
    if (!loaded_.valid()) begin_load();
    return loaded_.get().to(device_);
  }
  void cancel_load() override { loaded_ = {}; }

 private:
  // Returns an event behind all work that this thread has queued on the device.
  static std::shared_ptr<c10::Event> all_done(const torch::Device& device) {
    if (device.is_cpu()) return nullptr;
    const auto event = std::make_shared<c10::Event>(device.type());
    event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return event;
  }

  const int64_t size_;  // [bytes]
  const torch::Device device_;
  std::shared_future<torch::Tensor> packed_;
  std::future<torch::Tensor> loaded_;
};

class CompressBeside final : public remat::Place {
 public:
  std::shared_ptr<remat::StoredContents> begin_store(const torch::Tensor& flat) override {
    return std::make_shared<PackedBeside>(flat);
  }
};

// ---- a net, and the cost of the guards

torch::nn::Sequential make_net() {
  using namespace torch::nn;
  const auto conv = [](int64_t from, int64_t to) {
    return Conv2d(Conv2dOptions(from, to, 3).padding(1));
  };
  return Sequential(conv(1, 32), ReLU(), conv(32, 32), ReLU(), MaxPool2d(2), conv(32, 64), ReLU(),
                    MaxPool2d(2), Flatten(), Dropout(0.5), Linear(64 * 7 * 7, 128), ReLU(),
                    Linear(128, 10));
}

struct Variant {
  const char* name;
  std::function<std::shared_ptr<void>()> guard;
  std::vector<double> seconds{};
  int64_t held_bytes = 0;
  std::vector<torch::Tensor> gradients{};
  double median() {
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }
};

void step(Variant& variant, torch::nn::Sequential& net, const torch::Tensor& images,
          const remat::MemoryMeter& meter, const Target& target) {
  torch::manual_seed(1);  // of dropout
  target.wait();
  const int64_t before = meter.live_bytes();
  const auto start = std::chrono::steady_clock::now();
  torch::Tensor loss;
  {
    const auto guard = variant.guard();
    const Autocast autocast(target);
    loss = net->forward(images).square().mean();
  }
  variant.held_bytes = meter.live_bytes() - before;
  variant.gradients = torch::autograd::grad({loss}, net->parameters());
  target.wait();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  variant.seconds.push_back(time.count());
}

int compare(const Target& target) {
  const remat::MemoryMeter meter(target.device);
  torch::manual_seed(0);
  torch::nn::Sequential net = make_net();
  net->to(target.device);
  const torch::Tensor images = torch::randn({64, 1, 28, 28}, target.device);
  const std::filesystem::path folder = std::filesystem::temp_directory_path();
  std::vector<Variant> variants{
      {"no guard", [] { return nullptr; }},
      {"SaveOnDiskGuard",
       [&] { return std::make_shared<remat::SaveOnDiskGuard>(remat::SaveOnDiskOptions{folder}); }},
      {"Compress",
       [] {
         return std::make_shared<remat::SaveElsewhereGuard>(
             std::make_unique<Compress>(), remat::SaveElsewhereOptions{.min_bytes = 1 << 16});
       }},
      {"CompressBeside", [] {
         return std::make_shared<remat::SaveElsewhereGuard>(
             std::make_unique<CompressBeside>(),
             remat::SaveElsewhereOptions{
                 .min_bytes = 1 << 16, .prefetch_depth = 2, .max_bytes_in_flight = 16 << 20});
       }}};
  for (int round = 0; round <= num_rounds; ++round)
    for (Variant& variant : variants) {
      step(variant, net, images, meter, target);
      if (round == 0) variant.seconds.clear();  // warms up
    }

  bool is_right = variants[2].held_bytes < variants[0].held_bytes * 6 / 10;
  if (!target.device.is_cpu() || target.dtype != torch::kFloat)
    std::printf("On %s.\n", target.name().c_str());
  std::printf("%-16s %24s %10s %8s %10s\n", "", "MB alive after forward", "ms a step", "ratio",
              "gradients");
  for (Variant& variant : variants) {
    const bool is_equal = std::equal(variant.gradients.begin(), variant.gradients.end(),
                                     variants[0].gradients.begin(), torch::equal);
    is_right = is_right && (is_equal || !target.is_reproducible());
    std::printf("%-16s %24.1f %10.1f %8.2f %10s\n", variant.name,
                static_cast<double>(variant.held_bytes) / 1e6, variant.median() * 1e3,
                variant.median() / variants[1].median(), is_equal ? "bit-equal" : "DIFFER");
  }
  return is_right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return run_example("save_compressed", kUsage, argc, argv, [&] {
    Target target;
    parse_options(argc, argv, [&](const std::string& name, const auto& value) {
      return target.take(name, value);
    });
    return compare(target);
  });
}
