// first line: the_function_is_a_module_by_value__pass_its_holder_or_a_pointer_to_it
#include <torch/nn/modules/linear.h>

#include "remat/checkpoint.h"

void f(torch::nn::Linear linear, const at::Tensor& x) { remat::checkpoint(*linear, x); }
