#include "lib/base/waiting.h"

#include <atomic>

#include "remat/binding.h"

namespace remat {

namespace {
std::atomic<WaitCallbacks*> callbacks{nullptr};
}  // namespace

WaitCallbacks::~WaitCallbacks() = default;

void set_wait_callbacks(WaitCallbacks* all) { callbacks.store(all, std::memory_order_release); }

void Turns::wait(std::thread::id self) {
  const WaitForThread waiting;
  std::thread::id nobody{};
  while (!holder_.compare_exchange_weak(nobody, self, std::memory_order_acquire)) {
    nobody = {};
    std::this_thread::yield();
  }
}

WaitForThread::WaitForThread() {
  WaitCallbacks* const all = callbacks.load(std::memory_order_acquire);
  if (all != nullptr) let_go_ = all->let_go();
}

}  // namespace remat
