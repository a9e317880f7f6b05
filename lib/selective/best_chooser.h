#pragma once
// What save_best knows of the regions under it: their measured calls, and what to keep of them.
//
// Note [Choices and when they hold]
// A choice must be the same in a forward and in each recompute of it. For a region's own results
// nobody asks twice: a recompute takes what forward kept. But a region that is nested in another one
// is a new region in each recompute of that one, and what it keeps is saved in slots of the region
// around, which must be the same again. So a choice is never changed, and it holds for regions from a
// number on: that of the outermost region (`RegionInfo::outermost`), which stays the same however often and
// from which depth the nested ones are opened anew.

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lib/selective/call_graph.h"
#include "lib/selective/op_traits.h"
#include "remat/save_best.h"

namespace remat {

/// The calls of one run, as they were measured.
struct MeasuredCalls {
  struct Call {
    const OpTraits* op;      ///< what it is now called by may be another one of that name
    uint64_t arguments = 0;  ///< what they look like, as one number
    int64_t bytes = 0;       ///< of its results
    double seconds = 0;      ///< also if a recompute never comes to it
  };
  std::vector<Call> calls;
  CallGraph graph;  ///< with the same calls
};

/// One way that a region goes, and what is kept of it. Immutable.
struct ChosenWay {
  int64_t since = 0;  ///< the number of the first region for which it holds; 0: a file had it
  MeasuredCalls measured;
  ChosenCalls chosen;
};
using ChosenWays = std::vector<std::shared_ptr<const ChosenWay>>;

class BestChooser {
 public:
  explicit BestChooser(SaveBestOptions options);
  const SaveBestOptions& options() const { return options_; }

  struct Begin {
    ChosenWays ways;
    bool is_measured = false;
  };
  /// A region of that name begins.
  Begin begin(const std::string& name);
  /// It has run. `is_new`: none of the `num_ways` that it began with agreed; `measured`: null unless it was measured.
  void end(const std::string& name, bool is_new, std::size_t num_ways,
           std::unique_ptr<MeasuredCalls> measured);
  std::vector<BestChoice> choices();

 private:
  struct Known {
    ChosenWays ways;
    std::vector<std::unique_ptr<MeasuredCalls>> measured;  ///< and nothing chosen yet
    int num_to_measure = 0;
    int num_rounds = 1;
    int num_known = 0;         ///< runs of ways that it knows, since it measures
    std::size_t number = 0;    ///< in the order of their first run
    bool is_choosing = false;  ///< what was measured becomes ways, without the lock
  };
  Known& known(const std::string& name);

  void write_profile_of(const std::string& name);

  const SaveBestOptions options_;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, Known> regions_;
  bool has_warned_ = false;  ///< of a file that cannot be written
};

}  // namespace remat
