#pragma once
// Reads binary PPM files as (3, H, W) tensors of floats in [0, 1], and writes them.

#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace unet {

// Returns the next number of a PPM header, after white space and comment lines.
inline int64_t header_number(std::istream& file, const std::string& path) {
  while (file >> std::ws && file.peek() == '#') {
    std::string comment;
    std::getline(file, comment);
  }
  int64_t number = 0;
  if (!(file >> number) || number < 1 || number > 1 << 15)
    throw std::runtime_error(path + " has a broken PPM header");
  return number;
}

inline torch::Tensor read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic(2, '\0');
  if (!file.read(magic.data(), 2)) throw std::runtime_error("cannot read " + path);
  if (magic != "P6") throw std::runtime_error(path + " is no binary PPM file (P6)");
  const int64_t width = header_number(file, path), height = header_number(file, path);
  if (header_number(file, path) != 255)
    throw std::runtime_error(path + " does not have 8 bits a colour");
  file.get();
  torch::Tensor bytes = torch::empty({height, width, 3}, torch::kUInt8);
  if (!file.read(reinterpret_cast<char*>(bytes.data_ptr<uint8_t>()), bytes.numel()))
    throw std::runtime_error(path + " ends too early");
  return bytes.permute({2, 0, 1}).to(torch::kFloat).div(255).contiguous();
}

// Writes images of one size side by side, with a white gap.
inline void write_ppm(const std::string& path, const std::vector<torch::Tensor>& images) {
  std::vector<torch::Tensor> row;
  for (const torch::Tensor& image : images) {
    if (!row.empty()) row.push_back(torch::ones({3, image.size(1), 4}));
    row.push_back(image.clamp(0, 1));
  }
  const torch::Tensor bytes =
      torch::cat(row, 2).mul(255).round().to(torch::kUInt8).permute({1, 2, 0}).contiguous();
  std::ofstream file(path, std::ios::binary);
  file << "P6\n" << bytes.size(1) << ' ' << bytes.size(0) << "\n255\n";
  file.write(reinterpret_cast<const char*>(bytes.data_ptr<uint8_t>()), bytes.numel());
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

}  // namespace unet
