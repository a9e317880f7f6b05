#pragma once
// The operators of programs: total functions, which make any operands fit.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <vector>

#include "remat/state.h"
#include "tests/fuzz/program.h"

namespace fuzz {

using at::Tensor;
using Tensors = std::vector<Tensor>;

/// State of the user's own: each number depends on those drawn before.
class Numbers final : public remat::StateProvider {
 public:
  explicit Numbers(uint32_t start) : state_(start) {}
  uint32_t state() const { return state_; }
  /// Returns the latest number, in [0.5, 1.5).
  double latest() const { return 0.5 + state_ * 0x1p-32; }
  double next() {
    state_ = state_ * 1664525U + 1013904223U;
    return latest();
  }
  std::any capture() override { return state_; }
  void restore(const std::any& state) override { state_ = std::any_cast<uint32_t>(state); }

 private:
  uint32_t state_;
};

/// The device of programs: the CPU by default. Set it before the first program.
at::Device& device();

/// Properties of a run that its operators may ask for.
struct Surroundings {
  int64_t* hook_calls = nullptr;
  int64_t max_numel = 256;
  /// A null pointer without a guard around: a recompute would find the numbers in another state.
  std::array<Numbers*, 2> numbers{};
  std::array<const at::Generator*, 2> generators{};
};

struct Operator {
  const char* name;
  int arity;
  int outs;
  std::function<Tensors(const Tensors&, Dice&, const Surroundings&)> run;
  bool random = false;       ///< draws from the generator
  bool inplace = false;      ///< changes operand 0 and returns it
  bool writes_late = false;  ///< saves a tensor that its kernel writes afterwards
  bool reads_twice = false;  ///< its node reads a saved tensor twice in one backward
  bool backward_in_hook = false;
  bool writes_inside = false;  ///< consists of operators of which one changes another's result
  bool guarded = false;        ///< uses state that guards preserve
  bool asks_if_view = false;   ///< of operand 0; for an argument, a recompute cannot tell
  int weight = 2;
};

/// Returns the table. Its order is part of the meaning of a seed.
const std::vector<Operator>& operators();

/// Add the parts of the table.
void add_pointwise(std::vector<Operator>& table);
void add_shapes(std::vector<Operator>& table);
void add_functions(std::vector<Operator>& table);
void add_guarded(std::vector<Operator>& table);

/// Returns `a` in floating point.
Tensor floating(const Tensor& a);
/// Returns `b` in a shape and dtype that broadcasts with `a`.
Tensor like(const Tensor& b, const Tensor& a);
/// Return `a` as a matrix, as a batch of matrices, as a vector.
Tensor matrix(const Tensor& a);
Tensor cube(const Tensor& a);
Tensor line(const Tensor& a);
/// Returns whole numbers in [0, n) computed from `a`, in its shape.
Tensor whole_numbers(const Tensor& a, int64_t n);
/// Returns `m` with `rows` rows (dimension 0) and `columns` columns, cut or repeated.
Tensor sized(const Tensor& m, int64_t rows, int64_t columns);

}  // namespace fuzz
