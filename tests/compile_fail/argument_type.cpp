// first line: an_argument_has_a_type_that_the_function_does_not_take
#include <torch/nn/modules/linear.h>

#include "remat/checkpoint.h"

void f(torch::nn::Linear linear) { remat::checkpoint(linear.ptr(), "x"); }
