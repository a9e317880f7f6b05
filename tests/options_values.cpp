// DeterminismCheck::Values: tolerances, samples, and which NaN are equal.

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/support/support.h"

using remat::checkpoint;
using remat::CheckpointError;
using remat::CheckpointOptions;
using remat::DeterminismCheck;
using remat::ValueComparison;
using Kind = remat::CheckpointError::Kind;
using Nan = remat::ValueComparison::Nan;

namespace {

constexpr float nan_of_float = std::numeric_limits<float>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

const Tensor one = leaf_of(1);

/// A region of `one` that saves `forward` and then `recompute`.
Tensor saving(const ValueComparison& values, const Tensor& forward, const Tensor& recompute) {
  const auto calls = std::make_shared<int>(0);
  const CheckpointOptions options{.determinism_check = DeterminismCheck::Values, .values = values};
  return checkpoint(
      options,
      [=](const Tensor& t) {
        const Tensor saved = (++*calls == 1 ? forward : recompute).clone();
        if (!saved.is_floating_point() && !saved.is_complex()) return t * saved.to(at::kFloat);
        return t.to(saved.scalar_type()) * saved;
      },
      one);
}

bool agree(const ValueComparison& values, const Tensor& forward, const Tensor& recompute) {
  const Tensor y = saving(values, forward, recompute);
  try {
    grad_of(y, {one});
  } catch (const CheckpointError& error) {
    CHECK(error.kind() == Kind::ValueMismatch);
    return false;
  }
  return true;
}

Tensor float_of(double value) { return at::full({3}, value); }

/// A NaN with other bits than the usual one.
Tensor other_nan() { return at::full({3}, 0x7fc00001, at::kInt).view(at::kFloat); }

}  // namespace

TEST_CASE("by default Values compares bits", "[options][values]") {
  const ValueComparison defaults;
  CHECK(defaults.absolute_tolerance == 0);
  CHECK(defaults.relative_tolerance == 0);
  CHECK(defaults.max_elements == 0);
  CHECK(defaults.nan == Nan::Bits);
  CHECK(agree({}, float_of(1), float_of(1)));
  CHECK_FALSE(agree({}, float_of(1), float_of(std::nextafter(1.f, 2.f))));
  CHECK_FALSE(agree({}, float_of(0), float_of(-0.)));
  CHECK(agree({}, float_of(nan_of_float), float_of(nan_of_float)));
  CHECK_FALSE(agree({}, float_of(nan_of_float), other_nan()));
}

TEST_CASE("with a tolerance elements may differ by as much", "[options][values]") {
  const ValueComparison absolute{.absolute_tolerance = 0.25};
  CHECK(agree(absolute, float_of(8), float_of(8.25)));
  CHECK(agree(absolute, float_of(8), float_of(7.75)));
  CHECK_FALSE(agree(absolute, float_of(8), float_of(8.26)));
  CHECK_FALSE(agree(absolute, float_of(8), float_of(7.74)));
  CHECK(agree(absolute, float_of(0), float_of(-0.)));
  const ValueComparison relative{.relative_tolerance = 0.25};
  CHECK(agree(relative, float_of(-8), float_of(-10)));
  CHECK_FALSE(agree(relative, float_of(-8), float_of(-10.1)));
  CHECK_FALSE(agree(relative, float_of(0), float_of(1e-30)));
  const ValueComparison both{.absolute_tolerance = 1, .relative_tolerance = 0.25};
  CHECK(agree(both, float_of(8), float_of(11)));
  CHECK_FALSE(agree(both, float_of(8), float_of(11.1)));
  for (const auto dtype :
       {at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble}) {
    CAPTURE(dtype);
    CHECK(agree(both, float_of(8).to(dtype), float_of(11).to(dtype)));
    CHECK_FALSE(agree(both, float_of(8).to(dtype), float_of(12).to(dtype)));
  }
  const auto imaginary = [](double value) { return at::complex(float_of(1), float_of(value)); };
  CHECK(agree(both, imaginary(8), imaginary(11)));
  CHECK_FALSE(agree(both, imaginary(8), imaginary(12)));
}

TEST_CASE("an infinity equals itself only, whatever the tolerance", "[options][values]") {
  for (const ValueComparison& rule :
       {ValueComparison{.absolute_tolerance = 1e300}, ValueComparison{.relative_tolerance = 1},
        ValueComparison{.absolute_tolerance = infinity, .relative_tolerance = infinity}}) {
    CHECK(agree(rule, float_of(infinity), float_of(infinity)));
    CHECK_FALSE(agree(rule, float_of(infinity), float_of(-infinity)));
    CHECK_FALSE(agree(rule, float_of(infinity), float_of(1)));
    CHECK_FALSE(agree(rule, float_of(1), float_of(infinity)));
    CHECK_FALSE(agree(rule, float_of(infinity), float_of(nan_of_float)));
    CHECK_FALSE(agree(rule, float_of(nan_of_float), float_of(1)));
    CHECK_FALSE(agree(rule, float_of(1), float_of(nan_of_float)));
  }
}

TEST_CASE("NaN are equal by their bits, or all", "[options][values]") {
  for (const double tolerance : {0., 0.5})
    for (const int64_t max_elements : {0, 2}) {
      CAPTURE(tolerance, max_elements);
      const ValueComparison bits{.absolute_tolerance = tolerance, .max_elements = max_elements};
      ValueComparison any = bits;
      any.nan = Nan::Any;
      CHECK(agree(bits, other_nan(), other_nan()));
      CHECK_FALSE(agree(bits, float_of(nan_of_float), other_nan()));
      CHECK(agree(any, float_of(nan_of_float), other_nan()));
      CHECK_FALSE(agree(any, float_of(nan_of_float), float_of(1)));
      CHECK_FALSE(agree(any, float_of(nan_of_float), float_of(infinity)));
      CHECK(agree(any, at::complex(float_of(nan_of_float), float_of(1)),
                  at::complex(other_nan(), float_of(1))));
      CHECK_FALSE(agree(any, at::complex(float_of(nan_of_float), float_of(1)),
                        at::complex(float_of(1), float_of(nan_of_float))));
      for (const auto dtype : {at::kHalf, at::kBFloat16}) {
        const auto nan_of_bits =
            [dtype](int64_t bits) {  // a cast of NaN has other bits in other releases
              return at::full({3}, bits, at::kShort).view(dtype);
            };
        CHECK(agree(any, nan_of_bits(0x7fc0), nan_of_bits(0x7fff)));
        CHECK_FALSE(agree(bits, nan_of_bits(0x7fc0), nan_of_bits(0x7fff)));
      }
    }
}

TEST_CASE("max_elements compares a sample, spread over the whole tensor", "[options][values]") {
  const Seed seed;
  const Tensor all = at::randn({40, 50});
  for (const double tolerance : {0., 0.5}) {
    CAPTURE(tolerance);
    const auto with = [&](int64_t max_elements) {
      return ValueComparison{.absolute_tolerance = tolerance, .max_elements = max_elements};
    };
    CHECK(agree(with(100), all, all));
    int num_found = 0;
    std::vector<bool> found_in_row(40), found_in_column(50);
    for (int64_t i = 0; i < 2000; i += 7) {
      Tensor changed = all.clone();
      changed.view({-1})[i] += 1;
      CHECK_FALSE(agree(with(0), all, changed));
      CHECK_FALSE(agree(with(2000), all, changed));
      if (agree(with(400), all, changed)) continue;
      ++num_found;
      found_in_row[static_cast<std::size_t>(i / 50)] = true;
      found_in_column[static_cast<std::size_t>(i % 50)] = true;
    }
    // A fifth of the elements is compared.
    CHECK(num_found > 2000 / 7 / 5 / 2);
    CHECK(num_found < 2000 / 7 / 5 * 2);
    CHECK(std::count(found_in_row.begin(), found_in_row.end(), true) > 20);
    CHECK(std::count(found_in_column.begin(), found_in_column.end(), true) > 20);
    // Layouts, views and dtypes: the same elements in both passes.
    CHECK(agree(with(10), all.t(), all.t()));
    CHECK_FALSE(agree(with(10), all.t(), all.t() + 1));
    CHECK_FALSE(agree(with(10), all.to(at::kHalf), all.to(at::kHalf) + 1));
    CHECK_FALSE(agree(with(10), at::complex(all, all), at::complex(all, all + 1)));
    CHECK_FALSE(agree(with(10), at::arange(1000), at::arange(1000) + 1));
  }
}

TEST_CASE("a tolerance keeps the elements that it compares, and no more", "[options][values]") {
  const auto held = [](const ValueComparison& values) {
    const Tensor x = at::ones({1 << 16}).requires_grad_();
    const CheckpointOptions options{.determinism_check = DeterminismCheck::Values,
                                    .values = values};
    const LiveBytes bytes;
    const Tensor y = checkpoint(options, [](const Tensor& t) { return t.sin().exp().sum(); }, x);
    const int64_t held = bytes.held();
    y.backward();
    return held;
  };
  // The report keeps text, no tensor.
  CHECK(held({.absolute_tolerance = 1}) == held({}));
  CHECK(held({.absolute_tolerance = 1, .max_elements = 16}) == held({}));
}

TEST_CASE("the error says which element differs by more than the tolerance", "[options][values]") {
  const Tensor then = at::arange(6).to(at::kFloat), now = then.clone();
  now[3] = 4;
  now[5] = 9;
  const Tensor y = saving({.absolute_tolerance = 1.5}, then, now);
  const auto error = error_of<CheckpointError>([&] { grad_of(y, {one}); });
  REQUIRE(error.mismatches().size() == 1);
  CHECK(error.mismatches()[0].forward == "5 in element 5 of 6 that were compared");
  CHECK(error.mismatches()[0].recompute == "9 in element 5 of 6 that were compared");
}

TEST_CASE("sparse tensors and nested ones are compared with a tolerance, too",
          "[options][values]") {
  const ValueComparison rule{.absolute_tolerance = 0.5, .max_elements = 4};
  const auto sparse = [](double value) {
    return at::sparse_coo_tensor(at::arange(3).reshape({1, 3}), float_of(value), {5});
  };
  const auto nested = [](double value) {
    return at::_nested_tensor_from_tensor_list({float_of(value), at::full({2}, value)});
  };
  const auto agrees = [&](const Tensor& forward, const Tensor& recompute) {
    const auto calls = std::make_shared<int>(0);
    const Tensor x = leaf_of(2);
    const Tensor y = checkpoint(
        {.determinism_check = DeterminismCheck::Values, .values = rule},
        [=](const Tensor& t) {
          const Tensor saved = (++*calls == 1 ? forward : recompute).clone().requires_grad_();
          const Tensor product = saved * saved;  // saves it
          return t + (product.is_nested() ? product.unbind()[0].sum() : at::_sparse_sum(product));
        },
        x);
    try {
      y.backward();
      return true;
    } catch (const CheckpointError& error) {
      CHECK(error.kind() == Kind::ValueMismatch);
      return false;
    }
  };
  CHECK(agrees(sparse(1), sparse(1.125)));
  CHECK_FALSE(agrees(sparse(1), sparse(2)));
  CHECK(agrees(nested(1), nested(1.125)));
  CHECK_FALSE(agrees(nested(1), nested(2)));
}

TEST_CASE("a comparison that makes no sense is refused", "[options][values]") {
  const Tensor x = leaf({2});
  const auto run = [&](const ValueComparison& values, DeterminismCheck check) {
    checkpoint(
        {.determinism_check = check, .values = values}, [](const Tensor& t) { return t.sin(); }, x);
  };
  for (const ValueComparison& wrong :
       {ValueComparison{.absolute_tolerance = -1}, ValueComparison{.relative_tolerance = -1},
        ValueComparison{.relative_tolerance = std::nan("")}, ValueComparison{.max_elements = -1}}) {
    CHECK_THAT(text_of(error_of<c10::ValueError>([&] { run(wrong, DeterminismCheck::Values); })),
               contains("remat::checkpoint: CheckpointOptions::values has a negative or undefined "
                        "number (absolute_tolerance "));
    CHECK_NOTHROW(run(wrong, DeterminismCheck::Layout));
  }
}
