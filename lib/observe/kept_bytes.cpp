#include "lib/observe/kept_bytes.h"

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

namespace remat {

void RecomputedBytesByDevice::add(c10::Device device, int64_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    add_to(bytes_, device, bytes);
  }
  KeptBytes::all().add_recomputed(device, bytes);
}

int64_t RecomputedBytesByDevice::on(c10::Device device) const {
  const std::lock_guard lock(mutex_);
  for (const DeviceBytes& each : bytes_)
    if (each.device == device) return each.bytes;
  return 0;
}

// Leaked: tensors die in static destructors.
KeptBytes& KeptBytes::all() {
  static auto* const only = new KeptBytes;
  return *only;
}

std::size_t KeptBytes::place_of(c10::Device device) {
  if (device.is_cpu()) return 0;
  return 1 + std::min<std::size_t>(static_cast<std::size_t>(std::max<int>(device.index(), 0)),
                                   num_places - 2);
}

void KeptBytes::add(const KeptOfRegion& region) {
  const std::lock_guard lock(mutex_);
  regions_.emplace(region.id, &region);
  for (const KeptStorage& each : region.inputs)
    if (++owners_[each.identity] == 1) sums(each.device).inputs += each.bytes;
}

void KeptBytes::remove(const KeptOfRegion& region) {
  const std::lock_guard lock(mutex_);
  if (regions_.erase(region.id) == 0) return;
  for (const KeptStorage& each : region.inputs) {
    const auto found = owners_.find(each.identity);
    if (--found->second > 0) continue;
    owners_.erase(found);
    sums(each.device).inputs -= each.bytes;
  }
  for (const DeviceBytes& each : region.saved) sums(each.device).saved -= each.bytes;
}

void KeptBytes::set_saved(KeptOfRegion& region, std::vector<DeviceBytes> saved) {
  const std::lock_guard lock(mutex_);
  region.saved = std::move(saved);
  for (const DeviceBytes& each : region.saved) sums(each.device).saved += each.bytes;
}

void KeptBytes::add_parameter(const KeptStorage& parameter) {
  const std::lock_guard lock(mutex_);
  const DeviceBytes bytes{parameter.device, parameter.bytes};
  if (parameters_.emplace(parameter.identity, bytes).second)
    sums(parameter.device).parameters += parameter.bytes;
}

void KeptBytes::forget_parameters() {
  const std::lock_guard lock(mutex_);
  parameters_.clear();
  for (Sums& each : sums_) each.parameters = 0;
}

void KeptBytes::add_recomputed(c10::Device device, int64_t bytes) {
  sums(device).recomputed += bytes;
}

LiveKinds KeptBytes::now(c10::Device device, int64_t live) const {
  const Sums& sums = sums_[place_of(device)];
  return {.live = live,
          .parameters = sums.parameters,
          .inputs = sums.inputs,
          .saved = sums.saved,
          .recomputed = sums.recomputed};
}

FailedAllocation KeptBytes::failed(c10::Device device, int64_t asked, int64_t live) const {
  FailedAllocation failed{.device = device,
                          .asked_bytes = asked,
                          .live_bytes = live,
                          .parameters_bytes = now(device, live).parameters};
  const std::lock_guard lock(mutex_);
  std::map<std::string, FailedAllocation::Held> by_name;
  std::unordered_set<const c10::StorageImpl*> seen;
  for (const auto& [id, region] : regions_) {
    FailedAllocation::Held& held = by_name[*region->name];
    held.region = *region->name;
    ++held.regions;
    for (const KeptStorage& each : region->inputs)
      if (each.device == device && seen.insert(each.identity).second)
        held.inputs_bytes += each.bytes;
    for (const DeviceBytes& each : region->saved)
      if (each.device == device) held.saved_bytes += each.bytes;
    held.recomputed_bytes += region->recomputed->on(device);
  }
  const auto sum = [](const FailedAllocation::Held& held) {
    return held.inputs_bytes + held.saved_bytes + held.recomputed_bytes;
  };
  for (auto& [name, held] : by_name)
    if (sum(held) > 0) failed.held.push_back(std::move(held));
  std::stable_sort(failed.held.begin(), failed.held.end(),
                   [&](const auto& a, const auto& b) { return sum(a) > sum(b); });
  return failed;
}

}  // namespace remat
