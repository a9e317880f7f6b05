#pragma once
// A text as numbers: one id per distinct character, cut into random batches.

#include <torch/torch.h>

#include <array>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

struct Batch {
  torch::Tensor inputs;   // (B, T) ids
  torch::Tensor targets;  // (B, T) the character that follows each input

  Batch to(const torch::Device& device) const { return {inputs.to(device), targets.to(device)}; }
};

class Text {
 public:
  // Reads a file of single-byte characters. The last tenth is for evaluation.
  Text(const std::string& path, int64_t context) : context_(context) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      throw std::runtime_error(
          "cannot open the text '" + path +
          "': start from the folder that holds examples/, or pass --text FILE");
    }
    const std::string characters{std::istreambuf_iterator<char>(file), {}};
    std::array<int64_t, 256> ids;
    ids.fill(-1);
    for (const unsigned char c : characters) ids[c] = 0;
    for (int64_t& id : ids) {
      if (id == 0) id = vocabulary_++;
    }
    std::vector<int64_t> encoded;
    encoded.reserve(characters.size());
    for (const unsigned char c : characters) encoded.push_back(ids[c]);

    const torch::Tensor all = torch::tensor(encoded, torch::kLong);
    const int64_t training = all.size(0) * 9 / 10;
    training_ = all.slice(0, 0, training);
    held_out_ = all.slice(0, training);
    if (held_out_.size(0) < context + 1) {
      throw std::runtime_error("the text '" + path +
                               "' is too short: " + std::to_string(characters.size()) +
                               " characters, needed are " + std::to_string(10 * (context + 1)));
    }
  }

  int64_t size() const { return training_.size(0) + held_out_.size(0); }
  int64_t vocabulary() const { return vocabulary_; }

  Batch training_batch(int64_t batch_size, std::mt19937& random) const {
    return batch_of(training_, batch_size, random);
  }
  Batch held_out_batch(int64_t batch_size, std::mt19937& random) const {
    return batch_of(held_out_, batch_size, random);
  }

 private:
  Batch batch_of(const torch::Tensor& ids, int64_t batch_size, std::mt19937& random) const {
    std::vector<torch::Tensor> inputs, targets;
    for (int64_t i = 0; i < batch_size; ++i) {
      const int64_t start = static_cast<int64_t>(random() % (ids.size(0) - context_));
      inputs.push_back(ids.slice(0, start, start + context_));
      targets.push_back(ids.slice(0, start + 1, start + 1 + context_));
    }
    return {torch::stack(inputs), torch::stack(targets)};
  }

  int64_t context_;
  int64_t vocabulary_ = 0;
  torch::Tensor training_, held_out_;
};
