// Offloading on a real accelerator; passes over itself where there is none.

#include <chrono>
#include <thread>

#include "tests/device/offload_cases.h"
#include "tests/support/device_stats.h"

namespace {

/// None in a build or on a machine without CUDA, and with LibTorch before 2.9.
std::optional<offload::Accelerator> cuda() {
  const auto type = at::getAccelerator(/*checked=*/false);
  if (!has_device_stats || !type || *type != at::kCUDA || num_devices(at::kCUDA) == 0) {
    WARN("no CUDA device, or LibTorch before 2.9: nothing is tested");
    return std::nullopt;
  }
  return offload::Accelerator{at::Device(at::kCUDA, 0), [] {
                                // The engine's thread may still be letting go of a backward.
                                std::this_thread::sleep_for(std::chrono::milliseconds(50));
                                return device_bytes(0);
                              }};
}

}  // namespace

TEST_CASE("cuda: offloaded tensors leave the device and come back", "[cuda]") {
  const auto on = cuda();
  if (!on) return;
  const bool pin_memory = GENERATE(false, true);
  offload::device_bytes_are_those_without_grad(*on, pin_memory);
  offload::what_three_layers_save_leaves_the_device(*on, pin_memory);
  offload::a_view_of_an_unpacked_tensor_lives(*on, pin_memory);
  offload::views_come_back_exactly(*on, pin_memory);
  offload::a_second_backward_reads_again(*on, pin_memory);
}

TEST_CASE("cuda: offloaded inputs give plain gradients and hold less", "[cuda]") {
  const auto on = cuda();
  if (!on) return;
  offload::an_offloaded_block_holds_less(*on);
  offload::offloaded_inputs_give_plain_gradients(*on, 4, 256, 8);
  offload::views_of_restored_inputs_keep_their_values(*on);
}

TEST_CASE("cuda: a copy never holds what the kernel has yet to write", "[cuda]") {
  const auto on = cuda();
  if (!on) return;
  const Tensor start = at::randn({64, 33}).to(on->device);
  const auto run = [&](bool guarded) {
    at::manual_seed(5);
    const Tensor x = start.clone().requires_grad_();
    std::optional<remat::SaveOnCpuGuard> guard;
    if (guarded) guard.emplace(remat::SaveOnCpuOptions{.pin_memory = true});
    const Tensor y = at::rrelu(x * 1, 0.1, 0.9, /*training=*/true).sin();
    guard.reset();
    return grad_of(y, {x});
  };
  const Tensors plain = run(false);
  offload::require_same(run(true), plain);
}
