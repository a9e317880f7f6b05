#pragma once
// The operators that a name in a policy means.

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

namespace remat {

/// Returns the operators that a name means; see `save_ops`.
std::vector<c10::OperatorHandle> operators_named(const std::string& name);
/// Returns the OpTraits::name_number of each operator that a name means. Throws `c10::ValueError`
/// if there is none. Warns if no result of these operators can be kept. `function`: the caller.
std::vector<uint32_t> numbers_of_operators(const std::string& name, const char* function);

}  // namespace remat
