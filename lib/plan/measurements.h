#pragma once
// A file of measured chains, by what they were measured with.
//
// Note [The file of measurements]
// Text: a heading, and of each chain a line of what it was measured with, one of the chain and one
// of each stage, each followed by what of it moves. What it was measured with must be the same in
// every word to be used: the sample, the number of stages, how often they ran, LibTorch's version
// and threads, autocast around them. The functions themselves cannot be compared: a file belongs to
// a model. It is read when a chain is fitted, and written anew under another name that takes its
// place, so that nobody reads half of it.

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>

#include "remat/plan.h"

namespace remat {

/// What a chain is measured with, in one line.
std::string measured_with(std::size_t num_stages, const at::Tensor& sample,
                          const MeasureOptions& options);

/// None if the file has none, or does not exist. Throws `c10::ValueError` for a file that is
/// something else.
std::optional<ChainCost> read_measurement(const std::filesystem::path& file,
                                          const std::string& with);
/// Throws `c10::ValueError` if it cannot be written.
void add_measurement(const std::filesystem::path& file, const std::string& with,
                     const ChainCost& cost);

}  // namespace remat
