#include "lib/digest.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <array>
#include <bit>
#include <cstring>

#include "lib/engine_seam.h"

namespace remat {

namespace {

constexpr uint64_t odd = 0x9e3779b97f4a7c15ULL;

uint64_t combine(uint64_t seed, uint64_t value) { return (seed ^ value) * odd + (seed >> 29) + 1; }

/// Eight independent lanes, so that memory is what limits it: the standard library's hash, one
/// chain of multiplications, made a step with `Values` half as slow again.
uint64_t hash_of(const char* bytes, std::size_t size) {
  constexpr std::size_t num_lanes = 8, block = num_lanes * sizeof(uint64_t);
  std::array<uint64_t, num_lanes> lanes{};
  for (std::size_t i = 0; i < num_lanes; ++i) lanes[i] = combine(odd, i);
  const auto mix = [&lanes](const char* from) {
    std::array<uint64_t, num_lanes> words;
    std::memcpy(words.data(), from, block);
    for (std::size_t i = 0; i < num_lanes; ++i)
      lanes[i] = std::rotl((lanes[i] ^ words[i]) * odd, 29);
  };
  std::size_t done = 0;
  for (; done + block <= size; done += block) mix(bytes + done);
  if (done < size) {
    std::array<char, block> rest{};
    std::memcpy(rest.data(), bytes + done, size - done);
    mix(rest.data());
  }
  uint64_t hash = size;
  for (const uint64_t lane : lanes) hash = std::rotl(combine(hash, lane), 31);
  return hash;
}

// A transposed weight is hashed as it lies in memory: bringing it into logical order took longer
// than all the rest. Its strides are hashed too, then.
uint64_t digest_of_elements(const at::Tensor& tensor) {
  const at::Tensor near = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU);
  const at::Tensor dense = near.is_non_overlapping_and_dense() ? near : near.contiguous();
  uint64_t digest = hash_of(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  if (!dense.is_contiguous())
    for (const int64_t stride : dense.strides())
      digest = combine(digest, static_cast<uint64_t>(stride));
  return digest;
}

}  // namespace

uint64_t digest_of(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unrecorded;
  const seam::OperatorsUnseen unseen;
  if (!tensor.defined() || tensor.is_meta()) return 0;
  uint64_t digest = static_cast<uint64_t>(tensor.scalar_type());
  if (tensor.is_nested()) {
    if (tensor.layout() == at::kJagged)
      return combine(digest, digest_of_elements(at::_nested_get_values(tensor)));
    for (const at::Tensor& each : tensor.detach().unbind())
      digest = combine(digest, digest_of(each));
    return digest;
  }
  for (const int64_t size : tensor.sizes()) digest = combine(digest, static_cast<uint64_t>(size));
  if (tensor.layout() == at::kSparse) {
    digest = combine(digest, digest_of_elements(tensor._indices()));
    return combine(digest, digest_of_elements(tensor._values()));
  }
  if (tensor.layout() != at::kStrided)
    return combine(digest, digest_of_elements(tensor.to_dense()));
  return combine(digest, digest_of_elements(tensor));
}

}  // namespace remat
