#pragma once
// Watches which plans the script functions ran that a region's function called.

#include <vector>

#include "lib/seam/script.h"

namespace remat {

/// Collects the plans of one run of a region, in the order of the calls.
///
/// Note [The first script]
/// While LibTorch announces calls, every change of a thread's state costs it more, even without
/// scripts: 2,000 instructions a saved tensor in a recompute. So announcing is switched on only
/// when an operator of a script first saves a tensor in a region. That call began with the
/// optimizer on, and a recompute could not repeat it. So all tensors that this one region saves
/// from there on are saved without slots, and are not recomputed.
class ScriptWatch {
 public:
  ScriptWatch() = default;
  ~ScriptWatch() { end(); }
  ScriptWatch& operator=(ScriptWatch&&) = delete;

  /// Makes LibTorch announce calls of script methods. Returns false if it did so already.
  static bool begin_observing();
  /// Reports that a script's operator saves a tensor on this thread. A call that was not announced
  /// (of a function that is not a method) has returned, or is about to.
  void saw_save();
  /// Reports the call of a script module's method. Pass the result to ended() when the method has
  /// returned.
  void* began();
  static void ended(void* begun);
  /// Ends the watch. Call it when the region's function has returned.
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

/// Returns whether a recompute ran the plans of forward, as far as it got.
bool ran_same_plans(const std::vector<seam::ScriptPlan>& forward,
                    const std::vector<seam::ScriptPlan>& recompute);

}  // namespace remat
