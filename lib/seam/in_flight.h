#pragma once
// A copy that runs beside the program.

namespace remat {

class InFlight {
 public:
  virtual ~InFlight() = default;
  virtual bool is_over() const = 0;
  /// Waits until the copy is over.
  virtual void synchronize() const = 0;
};

}  // namespace remat
