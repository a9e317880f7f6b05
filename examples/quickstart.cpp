// Checkpoints one block: the same gradients from fewer bytes. Prints exactly
//
//     plain:        589828 bytes alive after forward
//     checkpointed: 65540 bytes alive after forward
//     gradients bit-equal: yes
//
// The 65,540 bytes are the block's output, which the loss keeps, and the loss itself.
// --device NAME runs it elsewhere (cuda, xpu, ...), --dtype bfloat16 by autocast, with other bytes.

#include <ATen/autocast_mode.h>
#include <remat/remat.h>
#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <string>

bool gradients_are_equal(const torch::Device& device) {
  const remat::MemoryMeter meter(device);  // counts the tensors made from here on
  torch::manual_seed(0);
  torch::nn::Sequential block(torch::nn::Linear(256, 1024), torch::nn::GELU(),
                              torch::nn::Linear(1024, 256));
  block->to(device);
  const torch::Tensor input = torch::randn({64, 256}, device);

  const auto gradients = [&meter, &input, &block](const char* name, auto forward) {
    const int64_t before = meter.live_bytes();
    const torch::Tensor loss = forward(input).square().mean();
    std::cout << name << meter.live_bytes() - before << " bytes alive after forward\n";
    return torch::autograd::grad({loss}, block->parameters());
  };
  const auto plain = gradients(
      "plain:        ", [block](const torch::Tensor& x) mutable { return block->forward(x); });
  const auto checkpointed = gradients(
      "checkpointed: ", [block](const torch::Tensor& x) { return remat::checkpoint(block, x); });

  const bool equal = std::equal(plain.begin(), plain.end(), checkpointed.begin(), torch::equal);
  std::cout << "gradients bit-equal: " << (equal ? "yes" : "no") << "\n";
  return equal;
}

int main(int argc, char** argv) {
  std::map<std::string, std::string> options{{"--device", "cpu"}, {"--dtype", "float32"}};
  bool is_usable = argc % 2 == 1;
  for (int i = 1; is_usable && i < argc; i += 2) {
    is_usable = options.contains(argv[i]);
    options[argv[i]] = argv[i + 1];
  }
  const std::string& dtype = options["--dtype"];
  if (!is_usable || (dtype != "float32" && dtype != "bfloat16")) {
    std::cerr << "usage: quickstart [--device NAME] [--dtype float32|bfloat16]\n";
    return 2;
  }
  try {
    const torch::Device device(options["--device"]);
    at::autocast::set_autocast_enabled(device.type(), dtype == "bfloat16");
    at::autocast::set_autocast_dtype(device.type(), torch::kBFloat16);
    at::autocast::set_autocast_cache_enabled(false);  // the two forwards share no cast weight
    return gradients_are_equal(device) ? 0 : 1;
  } catch (const c10::Error& error) {
    std::cerr << "quickstart: " << error.what_without_backtrace() << "\n";
    return 2;
  }
}
