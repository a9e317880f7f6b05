#pragma once
// Errors that a program is expected to throw, and their texts.

#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "remat/counters.h"
#include "remat/error.h"
#include "tests/support/catch.h"
#include "tests/support/gradients.h"

namespace remat::testing {

/// Returns a matcher for texts that contain `part`.
inline auto contains(const std::string& part) {
#if REMAT_TEST_CATCH3
  return Catch::Matchers::ContainsSubstring(part);
#else
  return Catch::Matchers::Contains(part);
#endif
}

/// Runs `f`, requires that it throws an `E`, and returns a copy of it.
template <class E, class F>
E error_of(F&& f) {
  std::optional<E> error;
  try {
    std::forward<F>(f)();
  } catch (const E& e) {
    error.emplace(e);
  } catch (const std::exception& e) {
    FAIL("another type was thrown: " << e.what());
  }
  if (!error) FAIL("nothing was thrown");
  return *error;
}

/// Returns the text of an error without LibTorch's backtrace.
template <class E>
std::string text_of(const E& error) {
  if constexpr (std::is_base_of_v<c10::Error, E>) {
    return error.what_without_backtrace();
  } else {
    return error.what();
  }
}

/// Drops the nodes that LibTorch's queue still holds after an error in backward, and their graph,
/// by a backward on the same thread.
void drop_ready_nodes();

/// Returns the error of a backward through `y`, which must leave nothing behind.
inline CheckpointError mismatch_of(const Tensor& y, const Tensor& x) {
  auto error = error_of<CheckpointError>([&] { grad_of(y, {x}, {.retain_graph = true}); });
  drop_ready_nodes();
  CHECK(remat::counters().recomputed_bytes_alive == 0);
  return error;
}

/// Requires the true gradient, or LibTorch's error about in-place changes.
template <class F>
void require_error_or_gradient(F&& gradient, const Tensors& expected) {
  Tensors grads;
  try {
    grads = gradient();
  } catch (const c10::Error& e) {
    CHECK_THAT(text_of(e), contains("modified by an inplace operation"));
    return;
  }
  require_bit_equal(grads, expected);
}

}  // namespace remat::testing
