#pragma once
// A file of measured chains, each under the conditions of its measurement.
//
// Note [The file of measurements]
// The file is text. After a heading it has, for each chain, a line of conditions (`measured_with`),
// a line of the chain and a line for each stage. If tensors could move, a line about moves follows
// the line of the chain and each line of a stage.
//
// A measurement is used only under the same conditions, word for word: the sample, the number of
// stages, the number of runs, LibTorch's version and threads, autocast. The functions themselves
// cannot be compared, so a file belongs to one model.
//
// The file is read when a chain is fitted. An update is written under another name and then
// renamed, so that a reader never gets half of it.

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <optional>
#include <string>

#include "remat/plan.h"

namespace remat {

/// Returns the conditions of a measurement, in one line.
std::string measured_with(std::size_t num_stages, const at::Tensor& sample,
                          const MeasureOptions& options);

/// Returns nothing if the file does not exist or has no such measurement. Throws `c10::ValueError`
/// for a file of another kind.
std::optional<ChainCost> read_measurement(const std::filesystem::path& file,
                                          const std::string& with);
/// Adds a measurement, or replaces it. Throws `c10::ValueError` if the file cannot be written.
void add_measurement(const std::filesystem::path& file, const std::string& with,
                     const ChainCost& cost);

}  // namespace remat
