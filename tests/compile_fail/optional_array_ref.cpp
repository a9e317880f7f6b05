// expect: pass a std::optional of a std::vector
#include "remat/checkpoint.h"

at::Tensor f(const at::Tensor& x, c10::OptionalArrayRef<int64_t> sizes) {
  return sizes ? x.view(*sizes) : x;
}

at::Tensor call(const at::Tensor& x, c10::OptionalArrayRef<int64_t> sizes) {
  return remat::checkpoint(f, x, sizes);
}
