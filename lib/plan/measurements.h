#pragma once
// A file of measured chains, each under the conditions of its measurement.
//
// Note [The file of measurements]
// The file is a JSON object with a format and, for each chain, the conditions (`measured_with`) and
// the costs, by the names of their members. A member that the file lacks has its default: a file
// from before the member existed is still read. The number of the format changes when a member gets
// another meaning.
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
