#pragma once
// Reruns: the content of a dropped value is made again by the calls that made it.

#include "lib/budget/graph.h"

namespace remat::budget {

/// Returns the storage with the content of a saved tensor's value, and makes the content again if
/// it was dropped. The caller does not hold the lock.
/// Throws errors of the operators that run, and c10::Error if a source has changed.
c10::Storage content_again(const Save& save, Runtime& runtime);

/// Ends, in a forked process, the reruns of threads that exist only in the parent.
void end_reruns_of_others();

/// Returns the runtime whose values this thread makes again now; or null.
const Runtime* rerun_on_this_thread();

}  // namespace remat::budget
