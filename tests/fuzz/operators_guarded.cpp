// The operators that use state preserved by guards: numbers of a provider, generators of their own.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "tests/fuzz/operators.h"

namespace fuzz {

namespace {

/// Returns `f` of operand 0 and one of the two generators; operand 0 alone without a guard.
template <class F>
auto drawing(F f) {
  return [f](const Tensors& a, Dice& dice, const Surroundings& around) -> Tensors {
    const Tensor x = floating(a[0]);
    const at::Generator* const generator = around.generators[dice.below(2)];
    const uint64_t salt = dice.bits();
    return {generator == nullptr ? x * 1.5 : f(x, *generator, salt)};
  };
}

}  // namespace

void add_guarded(std::vector<Operator>& t) {
  const auto add = [&t](const char* name, auto run, bool random) {
    t.push_back({name, 1, 1, run});
    t.back().guarded = true;
    t.back().random = random;
  };
  add(
      "times_next_number",
      [](const Tensors& a, Dice& dice, const Surroundings& around) -> Tensors {
        Numbers* const numbers = around.numbers[dice.below(2)];
        return {floating(a[0]) * (numbers == nullptr ? 1.5 : numbers->next())};
      },
      false);
  add(
      "power_of_latest_number",
      [](const Tensors& a, Dice& dice, const Surroundings& around) -> Tensors {
        const Numbers* const numbers = around.numbers[dice.below(2)];
        return {floating(a[0]).abs().add(0.5).pow(numbers == nullptr ? 1.5 : numbers->latest())};
      },
      false);
  add("own_uniform", drawing([](const Tensor& x, at::Generator own, uint64_t) {
        return x * at::rand(x.sizes(), own, x.options()).sin();
      }),
      true);
  add("own_bernoulli", drawing([](const Tensor& x, at::Generator own, uint64_t) {
        return x.sin() * at::empty_like(x).bernoulli_(0.5, own);
      }),
      true);
  t.back().writes_inside = true;
  add("own_normal", drawing([](const Tensor& x, at::Generator own, uint64_t) {
        return x.exp().clamp_max(9) * at::empty_like(x).normal_(0, 1, own);
      }),
      true);
  t.back().writes_inside = true;
  add("own_permutation", drawing([](const Tensor& x, at::Generator own, uint64_t) {
        const Tensor flat = x.reshape(-1);
        return flat
            .index_select(0, at::randperm(flat.numel(), own, flat.options().dtype(at::kLong)))
            .view(x.sizes());
      }),
      true);
  add("own_past_operators", drawing([](const Tensor& x, at::Generator own, uint64_t) {
        if (!x.is_cpu()) return x;
        std::lock_guard<std::mutex> lock(own.mutex());
        return x * (0.5 + own.get<at::CPUGeneratorImpl>()->random() * 0x1p-32);
      }),
      true);
  t.back().weight = 1;
  add("own_seeded", drawing([](const Tensor& x, at::Generator own, uint64_t salt) {
        {
          std::lock_guard<std::mutex> lock(own.mutex());
          own.set_current_seed(salt % 5);
        }
        return x * at::rand(x.sizes(), own, x.options());
      }),
      true);
  t.back().weight = 1;
}

}  // namespace fuzz
