#pragma once
// Which plans the script functions ran that a region's function called.

#include <vector>

#include "lib/seam/script.h"

namespace remat {

/// A watch has the plans of one run of a region, in the order of the calls.
/// See Note [Plans of script functions].
///
/// Note [The first script]
/// While LibTorch announces calls, every change of a thread's state costs it more, whether scripts
/// run or not: 2,000 instructions a saved tensor in a recompute. So it is asked to when an operator
/// of a script saves the first time in a region. That call has begun with the optimiser on, so that
/// a recompute could not repeat it: what this one region saves from there on is saved plainly, and
/// not recomputed.
class ScriptWatch {
 public:
  ScriptWatch() = default;
  ~ScriptWatch() { end(); }
  ScriptWatch& operator=(ScriptWatch&&) = delete;

  /// From now on LibTorch announces calls of script methods. False if it had been asked before.
  static bool begin_observing();
  /// A script's operator saves a tensor, on this thread. A call that nobody announced (of a
  /// function that is no method) has returned, or is about to.
  void saw_save();
  /// A method of a script module is called, and has returned: `began` gives what `ended` gets.
  void* began();
  static void ended(void* begun);
  /// The region's function has returned.
  void end() {
    if (saw_unannounced_) end_unannounced();
  }
  const std::vector<seam::ScriptPlan>& plans() const { return plans_; }

 private:
  static void take_unannounced();
  void end_unannounced();
  std::vector<seam::ScriptPlan> plans_;
  bool saw_unannounced_ = false;
};

/// Whether a recompute ran the plans of forward, as far as it came.
bool ran_same_plans(const std::vector<seam::ScriptPlan>& forward,
                    const std::vector<seam::ScriptPlan>& recompute);

}  // namespace remat
