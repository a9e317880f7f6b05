// first line: a_function_of_TorchScript_without_a_module__call_it_in_a_lambda
#include <torch/csrc/jit/api/compilation_unit.h>

#include "remat/checkpoint.h"

void f(torch::jit::CompilationUnit& unit, const at::Tensor& x) {
  remat::checkpoint(unit.find_function("f"), x);
}
