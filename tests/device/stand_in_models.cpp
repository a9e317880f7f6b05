// Support for models of `torch::nn` on the stand-in: moves to the device, own kernels where the
// CPU's do not serve, autocast.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <tuple>

#include "tests/device/stand_in.h"

namespace stand_in {

namespace {

// Note [Modules on a plug-in's device]
// `torch::nn::Module::to` gives each parameter the data of its copy, and asks whether the types of
// the two tensors allow that. LibTorch's own answer covers its own devices only; a plug-in must
// answer for itself (TensorImpl.h, has_compatible_shallow_copy_type). The tensors here are ordinary
// dense ones, like those of the CPU.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided &&
           (tensor.is_cpu() || tensor.device().type() == at::kPrivateUse1);
  };
  return is_dense(self) && is_dense(from);
}

std::optional<at::Tensor> near_or_none(const std::optional<at::Tensor>& tensor) {
  if (!tensor || !tensor->defined()) return std::nullopt;
  return near(*tensor);
}
at::Tensor far_as(const at::Tensor& like, const at::Tensor& result) {
  return result.defined() ? result.to(like.device()) : result;
}

// LibTorch chooses the CPU's convolution by device, without a kernel of this name.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  work_begins("aten::convolution_overrideable");
  return far_as(input, at::convolution(near(input), near(weight), near_or_none(bias), stride,
                                       padding, dilation, transposed, output_padding, groups));
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  work_begins("aten::convolution_backward_overrideable");
  const int64_t channels = gradient.size(1);
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      near(gradient), near(input), near(weight), at::OptionalIntArrayRef(at::IntArrayRef(channels)),
      stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {far_as(input, of_input), far_as(input, of_weight), far_as(input, of_bias)};
}

// The kernel changes running statistics, which the schema does not declare. With copies of them it
// would lose the changes.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps) {
  work_begins("aten::native_batch_norm");
  const auto [result, mean, deviation] = at::native_batch_norm(
      near(input), near_or_none(weight), near_or_none(bias), near_or_none(running_mean),
      near_or_none(running_var), training, momentum, eps);
  return {far_as(input, result), far_as(input, mean), far_as(input, deviation)};
}

// Draws from the device's own generator, like accelerators.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p,
                                           std::optional<bool> train) {
  work_begins("aten::native_dropout");
  const at::Tensor mask = at::empty(input.sizes(), at::kBool);
  if (!train.value_or(true) || p == 0) {
    mask.fill_(true);
    return {input.clone(), far_as(input, mask)};
  }
  const Draws draws = take(input.device().index(), static_cast<uint64_t>(input.numel()));
  bool* const kept = mask.mutable_data_ptr<bool>();
  for (int64_t i = 0; i < input.numel(); ++i)
    kept[i] = draws.uniform(static_cast<uint64_t>(i)) >= p;
  const at::Tensor result = near(input.contiguous()) * mask * (1 / (1 - p));
  return {far_as(input, result.to(input.scalar_type())), far_as(input, mask)};
}

// LibTorch's variant with an output would give the output another shape, and warn.
at::Tensor mse_loss(const at::Tensor& input, const at::Tensor& target, int64_t reduction) {
  work_begins("aten::mse_loss");
  return far_as(input, at::mse_loss(near(input), near(target), reduction));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("mse_loss", &mse_loss);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("native_dropout", &dropout);
}

// Casts the same operators as autocast on LibTorch's own devices.
#ifdef AT_FORALL_LOWER_PRECISION_FP
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define REMAT_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define REMAT_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define REMAT_FLOAT_UNLESS_SAID(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define REMAT_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(REMAT_LOWER)
  AT_FORALL_FP32(REMAT_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(REMAT_FLOAT_UNLESS_SAID)
  AT_FORALL_PROMOTE(REMAT_PROMOTE)
#undef REMAT_LOWER
#undef REMAT_FLOAT
#undef REMAT_FLOAT_UNLESS_SAID
#undef REMAT_PROMOTE
}
#endif

}  // namespace

}  // namespace stand_in
