#include "lib/observe/recordings.h"

namespace remat {

thread_local bool Writing::is_writing_ = false;

Recordings& recordings() {
  static auto* const all = new Recordings;  // leaked: tensors die in static destructors
  return *all;
}

bool any_wants(bool RecorderOptions::* wish) {
  bool wants = false;
  recordings().visit([&](Recording& each) { wants = wants || each.options().*wish; });
  return wants;
}

}  // namespace remat
