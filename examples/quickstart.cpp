// Checkpoints one block: the same gradients from fewer bytes. Prints exactly
//
//     plain:        589828 bytes alive after forward
//     checkpointed: 65540 bytes alive after forward
//     gradients bit-equal: yes
//
// The 65,540 bytes are the block's output, which the loss keeps, and the loss itself.

#include <remat/remat.h>
#include <torch/torch.h>

#include <algorithm>
#include <iostream>

int main() {
  const remat::MemoryMeter meter;  // counts the tensors made from here on
  torch::manual_seed(0);
  torch::nn::Sequential block(torch::nn::Linear(256, 1024), torch::nn::GELU(),
                              torch::nn::Linear(1024, 256));
  const torch::Tensor input = torch::randn({64, 256});

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
  return equal ? 0 : 1;
}
