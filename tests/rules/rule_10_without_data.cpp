// Rule 10: what reads the elements of saved tensors passes over those that have none.

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/empty.h>

#include <filesystem>

#include "tests/support/support.h"

using namespace remat::testing;

namespace {

Tensor zeros_without_data(const Tensor& like) {
  return at::_efficientzerotensor(like.sizes(), like.options());
}

Tensor saves_zeros(const Tensor& x) { return (x * zeros_without_data(x.detach()) + x.sin()).sin(); }

void require_plain_grads(const std::function<Tensor(const Tensor&)>& region) {
  const Tensor x = leaf({3}), copy = copy_of(x);
  const Tensor expected = grad_of(saves_zeros(copy), {copy})[0];
  const Tensor y = region(x);
  for (int i = 0; i < 2; ++i)
    CHECK(bit_equal(grad_of(y, {x}, {.retain_graph = true})[0], expected));
}

}  // namespace

TEST_CASE("a saved tensor of zeros that has no data is compared, kept and passed over by guards",
          "[checkpoint][rule-10]") {
  const auto save_all = [](const remat::PolicyContext&) {
    return remat::CheckpointPolicy::PreferSave;
  };
  require_plain_grads([](const Tensor& x) {
    return remat::checkpoint({.determinism_check = remat::DeterminismCheck::Values}, saves_zeros,
                             x);
  });
  require_plain_grads([&](const Tensor& x) {
    return remat::checkpoint(
        {.determinism_check = remat::DeterminismCheck::Values, .policy = save_all}, saves_zeros, x);
  });
  require_plain_grads([&](const Tensor& x) {
    const remat::SaveOnDiskGuard disk({std::filesystem::temp_directory_path(), 0});
    return remat::checkpoint({.policy = remat::Policy(save_all, {.save_through_hooks = true})},
                             saves_zeros, x);
  });
  require_plain_grads([](const Tensor& x) {
    const remat::SaveAsGuard narrow(at::kBFloat16);
    return saves_zeros(x.detach().requires_grad_()).defined() ? remat::checkpoint(saves_zeros, x)
                                                              : Tensor();
  });
  require_plain_grads([](const Tensor& x) {
    return remat::checkpoint(
        [](const Tensor& t) {
          const Tensor pinned = remat::pin(zeros_without_data(t.detach()));
          const Tensor kept = remat::save_region([&] { return zeros_without_data(t.detach()); });
          return (t * pinned + kept * t + t.sin()).sin();
        },
        x);
  });
}

TEST_CASE("a saved tensor whose storage was freed is compared without its contents",
          "[checkpoint][rule-10]") {
  const Tensor x = leaf({3});
  const Tensor y = remat::checkpoint(
      {.determinism_check = remat::DeterminismCheck::Values},
      [](const Tensor& t) {
        const Tensor made = at::full({3}, 2.0);
        const Tensor y = t * made;
        made.storage().unsafeGetStorageImpl()->set_nbytes(0);
        return (y.sin() * t).sum();
      },
      x);
  CHECK(grad_of(y, {x})[0].defined());
}
