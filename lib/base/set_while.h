#pragma once
// Sets a variable for the lifetime of an object.

#include <utility>

namespace remat {

/// Sets the variable to the value while alive, and back to its value before at the end.
template <class T>
class SetWhile {
 public:
  SetWhile(T& variable, T value) : variable_(variable), before_(std::exchange(variable, value)) {}
  ~SetWhile() { variable_ = before_; }
  SetWhile& operator=(SetWhile&&) = delete;

 private:
  T& variable_;
  const T before_;
};

}  // namespace remat
