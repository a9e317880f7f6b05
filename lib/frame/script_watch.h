#pragma once
// Which plans the script functions ran that a region's function called.

#include <vector>

#include "lib/seam/script.h"

namespace remat {

/// A watch has the plans of one run of a region, in the order of the calls. See Note [Plans of script functions].
class ScriptWatch {
 public:
  ScriptWatch() = default;
  ~ScriptWatch() { end(); }
  ScriptWatch& operator=(ScriptWatch&&) = delete;

  /// A script's operator saves a tensor, on this thread. A call that nobody announced (of a function that is no
  /// method) has returned, or is about to.
  void saw_save();
  /// A method of a script module is called, and has returned: `began` gives what `ended` gets.
  void* began();
  static void ended(void* begun);
  /// The region's function has returned.
  void end();
  const std::vector<seam::ScriptPlan>& plans() const { return plans_; }

 private:
  static void take_unannounced();
  std::vector<seam::ScriptPlan> plans_;
};

/// Whether a recompute ran the plans of forward, as far as it came.
bool ran_same_plans(const std::vector<seam::ScriptPlan>& forward,
                    const std::vector<seam::ScriptPlan>& recompute);

}  // namespace remat
