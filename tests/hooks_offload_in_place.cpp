// Guards of hooks.h that keep saved tensors elsewhere: tensors that change after they were saved.

#include <optional>
#include <random>

#include "tests/support/each_guard.h"

using remat::checkpoint;
using remat::SaveAsGuard;
using remat::SavedTensorHooksGuard;

TEST_CASE(
    "a tensor that is changed in place after it was saved raises or has the values of the save",
    "[hooks][offload]") {
  const Tensor x = leaf({128});
  with_each_guard([&](auto make) {
    const auto guard = make();
    const auto check = [&](const Tensor& y, const Tensor& expected) {
      try {
        require_bit_equal(grad_of(y, {x}), {expected});
      } catch (const c10::Error& e) {
        CHECK_THAT(e.what(), contains(changed_in_place));
      }
    };
    {
      const Tensor y = x.exp(), expected = y.detach().clone();
      y.detach().mul_(2);
      check(y, expected);
    }
    {  // does not require grad: copied when the next operator saves
      const Tensor mask = at::full({128}, 2.f);
      const Tensor y = x * mask;
      mask.mul_(3);
      const Tensor z = x.exp();
      check(y, at::full({128}, 2.f));
    }
    {
      const Tensor mask = at::full({128}, 2.f);
      const Tensor y = x * mask;
      const Tensor z = x.exp();
      mask.mul_(3);
      check(y, at::full({128}, 2.f));
    }
    {  // other tensors put into the object that was saved
      const Tensor mask = at::full({128}, 2.f);
      const Tensor y = x * mask;
      mask.set_data(at::full({128}, 5.f));
      check(y, at::full({128}, 2.f));
    }
  });
}

TEST_CASE("a parameter that stays and is changed in place raises as plain autograd does",
          "[hooks][offload]") {
  with_each_guard([](auto make) {
    const Tensor x = leaf({4}), p = leaf({4});
    const auto guard = make();
    const Tensor y = x * p;
    const auto version = p._version();
    {
      at::NoGradGuard no_grad;
      p.add_(1);
    }
    const auto error = error_of<c10::Error>([&] { grad_of(y, {x}); });
    CHECK_THAT(text_of(error), contains(changed_in_place));
    CHECK_THAT(text_of(error),
               contains("is at version " + std::to_string(version + 1) + "; expected version " +
                        std::to_string(version) + " instead"));
  });
  drop_ready_nodes();
}

TEST_CASE("a saved tensor whose storage was made smaller raises", "[hooks][offload]") {
  with_each_guard([](auto make) {
    const Tensor x = leaf({400}), p = leaf({400});
    const auto guard = make();
    const Tensor y = x * p;
    p.storage().unsafeGetStorageImpl()->set_nbytes(16);
    CHECK_THROWS_WITH(grad_of(y, {x}), contains("was made smaller before backward"));
    p.storage().unsafeGetStorageImpl()->set_nbytes(1600);
  });
  drop_ready_nodes();
}

TEST_CASE("a copy never holds what the kernel has yet to write", "[hooks][offload]") {
  const Tensor start = at::randn({64, 33}, at::kDouble);
  const bool in_place = GENERATE(false, true), next_inside = GENERATE(false, true);
  const Seed seed(3);
  const auto run = [&](auto make) {
    at::manual_seed(5);
    const Tensor x = start.clone().requires_grad_();
    Tensor y;
    {
      [[maybe_unused]] const auto guard = make();
      Tensor h = x * 1;
      y = in_place ? at::rrelu_(h, 0.1, 0.9, /*training=*/true)
                   : at::rrelu(h, 0.1, 0.9, /*training=*/true);
      if (next_inside) y = y.sin();
    }
    return grad_of(y, {x});
  };
  const Tensors plain = run([] { return 0; });
  with_each_guard([&](auto make) { require_bit_equal(run(make), plain); });
  const Tensors rounded = run([] { return std::make_unique<SaveAsGuard>(at::kFloat); });
  CHECK(at::allclose(rounded[0], plain[0], 1e-5, 1e-6));
}

TEST_CASE("random programs with views, in-place operators and regions: right gradients or an error",
          "[hooks][offload]") {
  const Seed seed;
  // The clone of a saved tensor is right: it has the values of the save. The noise of rrelu
  // is not written by then, and nobody changes it later.
  const auto cloning_if = [](bool always) {
    return std::make_unique<SavedTensorHooksGuard>(
        [always](const Tensor& t) { return always || t.requires_grad() ? t.clone() : t; },
        [](const Tensor& t) { return t; });
  };
  const auto cloning = [&] { return cloning_if(true); };
  const auto run = [&](uint64_t program, auto make,
                       bool is_right = false) -> std::optional<Tensors> {
    std::mt19937 choose(static_cast<std::mt19937::result_type>(program));
    at::manual_seed(program);
    const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(choose() % n); };
    const Tensors leaves{leaf({6, 6}, at::kDouble), leaf({6, 6}, at::kDouble)};
    Tensors all{leaves[0] + 1, leaves[1].t() * 2, leaves[0]};
    Tensors masks{at::rand({6, 6}, at::kDouble),
                  at::rand({12, 12}, at::kDouble).slice(1, 2, 8).slice(0, 3, 9)};
    const auto square = [](const Tensor& t) {
      return t.reshape({-1}).slice(0, 0, 36).reshape({6, 6});
    };
    try {
      {
        auto guard = make();
        for (int step = 0; step < 14; ++step) {
          const Tensor a = all[pick(all.size())], b = all[pick(all.size())];
          Tensor& mask = masks[pick(masks.size())];
          Tensor made;
          switch (pick(13)) {
            case 0:
              made = a.sin();
              break;
            case 1:
              made = a * b;
              break;
            case 2:
              made = a * mask;
              break;
            case 3:
              made = a.t();
              break;
            case 4:
              made = at::cat({a, b}).slice(0, 3, 9);
              break;
            case 5:
              made = square(a.slice(1, 0, 3).contiguous().expand({4, 6, 3}));
              break;
            case 6: {
              const auto inner = is_right ? cloning_if(false) : nullptr;
              made = at::rrelu(a, 0.1, 0.3, true);
            } break;
            case 7:
              made = at::dropout(a, 0.3, true);
              break;
            case 8: {
              const at::NoGradGuard no_grad;
              mask.mul_(1.25);
              continue;
            }
            case 9: {
              if (a.is_leaf() || (a.is_view() && a._base().is_leaf())) continue;
              const Tensor changed_one = a.slice(0, 1, 3).mul_(0.5);
              continue;
            }
            case 10:
              made = checkpoint([&](const Tensor& t) { return (t * t.sin()).exp().tanh(); }, a);
              break;
            case 11:
              made = a.softmax(1).mm(b);
              break;
            case 12:
              made = (a.chunk(2)[0] * a.chunk(2)[1]).repeat({2, 1}).tanh();
              break;
          }
          all.push_back(made);
        }
        if (pick(2) == 0) guard.reset();
        Tensor sum = at::zeros({}, at::kDouble);
        for (const Tensor& each : all) sum = sum + each.sigmoid().sum();
        const Tensors once = grad_of(sum, leaves, {.retain_graph = true, .allow_unused = true});
        const Tensors twice = grad_of(sum, leaves, {.retain_graph = false, .allow_unused = true});
        require_bit_equal(twice, once);
        return once;
      }
    } catch (const c10::Error& e) {
      if (std::string(e.what()).find(changed_in_place) == std::string::npos) throw;
      return std::nullopt;
    }
  };
  int compared = 0;
  for (uint64_t i = 0; i < 150; ++i) {
    const uint64_t program = seed.value() * 1000 + i;
    CAPTURE(program);
    const auto right = run(program, cloning, true);
    REQUIRE(right.has_value());
    with_each_guard([&](auto make) {
      if (const auto found = run(program, make)) {
        require_bit_equal(*found, *right);
        ++compared;
      }
    });
  }
  CHECK(compared > 150);
  drop_ready_nodes();
}
