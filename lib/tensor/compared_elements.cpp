#include "lib/tensor/compared_elements.h"

#include <fmt/format.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lib/seam/dispatch_mode.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

/// The header of a part, followed by its elements.
struct PartHeader {
  at::ScalarType dtype;  ///< Undefined for a hash in place of the elements
  int64_t numel;
};

void append_part(std::string& bytes, at::ScalarType dtype, int64_t numel, const void* data,
                 std::size_t size) {
  const PartHeader header{dtype, numel};
  char raw[sizeof header] = {};  // no padding of unknown bytes
  std::memcpy(raw + offsetof(PartHeader, dtype), &header.dtype, sizeof header.dtype);
  std::memcpy(raw + offsetof(PartHeader, numel), &header.numel, sizeof header.numel);
  bytes.append(raw, sizeof raw);
  bytes.append(static_cast<const char*>(data), size);
}

void append_hash(std::string& bytes, const at::Tensor& tensor) {
  const uint64_t hash = content_hash(tensor);
  append_part(bytes, at::ScalarType::Undefined, 1, &hash, sizeof hash);
}

uint64_t scattered(uint64_t number) {
  number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9u;
  number = (number ^ (number >> 27)) * 0x94d049bb133111ebu;
  return number ^ (number >> 31);
}

/// Returns one index in each of `count` equal ranges, at varying places: every n-th element could
/// belong to the same column.
at::Tensor spread_indices(int64_t numel, int64_t count) {
  at::Tensor indices = at::empty({count}, at::kLong);
  auto* const data = indices.mutable_data_ptr<int64_t>();
  const int64_t step = numel / count, rest = numel % count;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * step + std::min(i, rest), size = step + (i < rest ? 1 : 0);
    data[i] = begin + static_cast<int64_t>(scattered(static_cast<uint64_t>(i)) %
                                           static_cast<uint64_t>(size));
  }
  return indices;
}

at::ScalarType integer_of_size(std::size_t size) {
  return size == 1 ? at::kByte : size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong;
}

/// Returns the compared elements of a dense tensor, in memory of the CPU.
at::Tensor sample_of(const at::Tensor& tensor, int64_t max_elements) {
  if (max_elements == 0 || tensor.numel() <= max_elements) return tensor.to(at::kCPU).contiguous();
  // Few operators support every floating-point dtype.
  const at::Tensor raw = tensor.view(integer_of_size(tensor.element_size()));
  const at::Tensor indices = spread_indices(tensor.numel(), max_elements).to(tensor.device());
  return raw.take(indices).to(at::kCPU).view(tensor.scalar_type());
}

at::Tensor with_one_nan(const at::Tensor& sample) {
  const at::Tensor known = sample.element_size() == 1 ? sample.to(at::kFloat) : sample;
  return known.masked_fill(known.isnan(), std::numeric_limits<double>::quiet_NaN());
}

void append_dense(std::string& bytes, const at::Tensor& tensor, const ValueComparison& rule) {
  const at::Tensor plain = tensor.resolve_conj().resolve_neg();
  const at::Tensor parts = plain.is_complex() ? at::view_as_real(plain) : plain;
  at::Tensor sample = sample_of(parts, rule.max_elements);
  if (rule.nan == ValueComparison::Nan::Any && sample.is_floating_point())
    sample = with_one_nan(sample);
  if (sample.is_floating_point())
    append_part(bytes, sample.scalar_type(), sample.numel(), sample.const_data_ptr(),
                sample.nbytes());
  else
    append_hash(bytes, sample);
}

void append(std::string& bytes, const at::Tensor& tensor, const ValueComparison& rule) {
  const bool has_elements = tensor.defined() && !tensor.is_meta() && !tensor._is_zerotensor();
  if (has_elements && tensor.is_nested()) {
    if (tensor.layout() == at::kJagged) return append(bytes, at::_nested_get_values(tensor), rule);
    for (const at::Tensor& each : tensor.unbind()) append(bytes, each, rule);
  } else if (has_elements && !has_no_memory(tensor) && tensor.layout() == at::kSparse) {
    append(bytes, tensor._indices(), rule);
    append(bytes, tensor._values(), rule);
  } else if (!has_elements || has_no_memory(tensor) || tensor.layout() != at::kStrided ||
             tensor.is_quantized() || (tensor.numel() > 0 && tensor.storage().nbytes() == 0)) {
    append_hash(bytes, tensor);
  } else {
    append_dense(bytes, tensor, rule);
  }
}

/// Returns the elements of a part as numbers.
at::Tensor numbers_of(const PartHeader& header, const char* data) {
  return at::from_blob(const_cast<char*>(data), {header.numel}, header.dtype).to(at::kDouble);
}

bool is_close(double forward, double recompute, const ValueComparison& rule) {
  if (std::isinf(forward) || std::isinf(recompute)) return forward == recompute;
  return std::abs(recompute - forward) <=
         rule.absolute_tolerance + rule.relative_tolerance * std::abs(forward);
}

}  // namespace

std::string compared_elements(const at::Tensor& tensor, const ValueComparison& rule) {
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unrecorded;
  const seam::DispatchModeOff unseen;
  std::string bytes;
  append(bytes, tensor.defined() ? tensor.detach() : tensor, rule);
  return bytes;
}

std::optional<ElementDifference> first_difference(const std::string& forward,
                                                  const std::string& recompute,
                                                  const ValueComparison& rule) {
  if (forward == recompute) return std::nullopt;
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unrecorded;
  const seam::DispatchModeOff unseen;
  for (std::size_t at = 0; at < forward.size() && at < recompute.size();) {
    PartHeader then, now;
    std::memcpy(&then, forward.data() + at, sizeof then);
    std::memcpy(&now, recompute.data() + at, sizeof now);
    if (then.dtype != now.dtype || then.numel != now.numel) break;
    at += sizeof then;
    const bool is_hash = then.dtype == at::ScalarType::Undefined;
    const std::size_t size = is_hash ? sizeof(uint64_t) : c10::elementSize(then.dtype);
    const char* const a = forward.data() + at;
    const char* const b = recompute.data() + at;
    const std::size_t num_bytes = size * static_cast<std::size_t>(then.numel);
    at += num_bytes;
    if (std::memcmp(a, b, num_bytes) == 0) continue;
    if (is_hash) {
      uint64_t hash_then = 0, hash_now = 0;
      std::memcpy(&hash_then, a, size);
      std::memcpy(&hash_now, b, size);
      return ElementDifference{0, 1, fmt::format("hash {:016x}", hash_then),
                               fmt::format("hash {:016x}", hash_now)};
    }
    const at::Tensor numbers_then = numbers_of(then, a), numbers_now = numbers_of(now, b);
    const auto* const x = numbers_then.const_data_ptr<double>();
    const auto* const y = numbers_now.const_data_ptr<double>();
    for (int64_t i = 0; i < then.numel; ++i)
      if (std::memcmp(a + static_cast<std::size_t>(i) * size,
                      b + static_cast<std::size_t>(i) * size, size) != 0 &&
          !is_close(x[i], y[i], rule))
        return ElementDifference{i, then.numel, fmt::format("{}", x[i]), fmt::format("{}", y[i])};
  }
  if (forward.size() == recompute.size()) return std::nullopt;
  return ElementDifference{0, 0, "other parts", "other parts"};
}

}  // namespace remat
