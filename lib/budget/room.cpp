#include "lib/budget/room.h"

#include <algorithm>
#include <mutex>

#include "lib/base/byte_hash.h"
#include "lib/budget/cost_table.h"

namespace remat::budget {

RoomForCall::RoomForCall(Runtime& runtime, uint64_t call) : runtime_(runtime) {
  for (const Bound* const bound : runtime.bounds().far()) {
    const c10::Device device = bound->options.device;
    const bool is_known = std::any_of(places_.begin(), places_.end(),
                                      [&](const Place& each) { return each.bound->is_of(device); });
    if (is_known) continue;
    const uint64_t key = combine(call, static_cast<uint64_t>(device.index()) + 1);
    int64_t expected = 0;
    {
      const std::lock_guard<std::mutex> lock(Graph::get().mutex());
      expected = CostTable::get().bytes(key);
    }
    if (expected > 0)
      announce(device, expected, bound->memory.live_bytes(), /*in_allocator=*/false);
    const MemoryNow now = bound->memory.now();
    places_.push_back({bound, key, expected, now.live_bytes, now.peak_bytes});
  }
}

void RoomForCall::end() {
  for (const Place& each : places_) {
    const MemoryNow now = each.bound->memory.now();
    const int64_t most = now.peak_bytes > each.peak_bytes ? now.peak_bytes : now.live_bytes;
    const int64_t taken = most - each.live_bytes;
    if (taken <= each.expected_bytes) continue;
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    CostTable::get().note_bytes(each.call, taken);
    runtime_.bounds().note_alive(each.bound->options.device, most);
  }
}

}  // namespace remat::budget
