#pragma once
// A copy that is made beside the program.

namespace remat {

class InFlight {
 public:
  virtual ~InFlight() = default;
  virtual bool is_over() const = 0;
  /// Returns when it is.
  virtual void synchronize() const = 0;
};

}  // namespace remat
