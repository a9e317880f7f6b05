#pragma once
// A file of what save_best has measured, by the names of regions.
//
// Note [The file of profiles]
// Text: a heading, and of each way that a region goes two lines, of what it was measured with and of its name, then one of
// how much follows: a line for each storage that its calls make, and one for each call. How many bytes may be kept is
// not in it, so one file does for all budgets. What it was measured with (LibTorch's version, threads) must be the
// same in every word to be used. A call is known again as in the process that measured it: by its operator and what its
// arguments look like; so a region that goes another way is measured anew. Ways of operators that are not there are passed
// over. The file is read when the policy is made, and written anew under another name that takes its place, so that
// nobody reads half of it.

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "lib/selective/best_chooser.h"

namespace remat {

/// Profiles by region. None if the file does not exist; throws `c10::ValueError` for one that is something else.
std::map<std::string, std::vector<MeasuredCalls>> read_profiles(const std::filesystem::path& file);

/// Puts the ways of a region in the place of those that it had. Throws `c10::ValueError` if they cannot be written.
void write_profile(const std::filesystem::path& file, const std::string& region,
                   const ChosenWays& ways);

}  // namespace remat
