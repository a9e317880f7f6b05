#pragma once
// A wait for another thread, which a binding of another language may have to prepare for.

#include <memory>

namespace remat {

/// While alive, this thread waits: what the binding's WaitCallbacks let go of is gone, and comes back when
/// this dies. Declare it before the lock that the wait gives up, and hold no other one.
class Waiting {
 public:
  Waiting();

 private:
  std::shared_ptr<void> let_go_;
};

}  // namespace remat
