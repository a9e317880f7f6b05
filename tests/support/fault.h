#pragma once
// An exception of a type of the tests' own.

#include <stdexcept>

namespace remat::testing {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace remat::testing
