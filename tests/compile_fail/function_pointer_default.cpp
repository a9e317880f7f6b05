// first line: an_argument_is_missing__function_pointers_have_no_default_arguments
#include "remat/checkpoint.h"

at::Tensor scaled(const at::Tensor& x, double = 2) { return x; }
void f(const at::Tensor& x) { remat::checkpoint(scaled, x); }
