#include "lib/budget/settings.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

namespace remat::budget {

namespace {
constexpr uint32_t dtype_bits = 0xFF, onednn_bit = 0x100, deterministic_bit = 0x200;
constexpr int first_bit_of_threads = 10;
}  // namespace

uint32_t settings_now() {
  const at::Context& context = at::globalContext();
  return static_cast<uint32_t>(c10::get_default_dtype_as_scalartype()) |
         (context.userEnabledMkldnn() ? onednn_bit : 0) |
         (context.deterministicAlgorithms() ? deterministic_bit : 0) |
         static_cast<uint32_t>(at::get_num_threads()) << first_bit_of_threads;
}

const char* difference_of_settings(uint32_t a, uint32_t b) {
  const uint32_t differing = a ^ b;
  if ((differing & dtype_bits) != 0) return "the default dtype";
  if ((differing & onednn_bit) != 0) return "the use of oneDNN";
  if ((differing & deterministic_bit) != 0) return "the use of deterministic algorithms";
  return "the number of threads";
}

}  // namespace remat::budget
