#include "lib/rng/device_claims.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace remat {

namespace {

struct AllClaims {
  std::mutex mutex;
  std::unordered_map<c10::Device, int> num_threads;
};
AllClaims& all_claims() {
  static auto* const all = new AllClaims;  // leaked: threads may end after static destructors
  return *all;
}

struct ThreadClaims {
  c10::SmallVector<c10::Device, 2> devices;
  bool has(c10::Device device) const {
    return std::find(devices.begin(), devices.end(), device) != devices.end();
  }
  ~ThreadClaims() {
    std::lock_guard<std::mutex> lock(all_claims().mutex);
    for (const c10::Device& each : devices) --all_claims().num_threads[each];
  }
};
thread_local ThreadClaims own_claims;

}  // namespace

void claim(c10::Device device) {
  if (device.is_cpu() || own_claims.has(device)) return;
  own_claims.devices.push_back(device);
  std::lock_guard<std::mutex> lock(all_claims().mutex);
  ++all_claims().num_threads[device];
}

bool is_claimed_by_others(c10::Device device) {
  if (own_claims.has(device)) return false;
  std::lock_guard<std::mutex> lock(all_claims().mutex);
  const auto found = all_claims().num_threads.find(device);
  return found != all_claims().num_threads.end() && found->second > 0;
}

}  // namespace remat
