#pragma once
// A policy that chooses by itself: what spares most time for a number of bytes, by measured calls.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "remat/export.h"
#include "remat/policy.h"

namespace remat {

/// What `save_best` may keep, and how it finds out.
struct SaveBestOptions {
  /// [bytes] of results that each region may keep by this policy. With 0 it keeps what needs no
  /// memory: results that only calls which are kept themselves would read.
  int64_t bytes = 0;
  /// So many runs of a region are measured, and keep nothing. Of the times of a call the least counts.
  int profile_runs = 2;
  /// Says what a call takes [seconds], instead of the clock: figures from elsewhere, or from a formula.
  /// Asked once for every call of a measured run, in order, before the call runs.
  std::function<double(const PolicyContext&)> seconds_of{};
  /// A file of profiles, by the names of regions: read when the policy is made, so that regions which are in it
  /// are chosen for without being measured, for any `bytes`; and added to when others have been. One that does not
  /// exist is made. It belongs to a model, LibTorch's version and a number of threads. Empty: none.
  std::filesystem::path profiles{};
  /// What it keeps of an accelerator's results waits on the CPU, and `bytes` are of that: it moves as `selective` says,
  /// as with PreferCpuOffload. What is smaller than its `min_offload_bytes`, or cannot be moved, stays.
  bool offload = false;
  /// Options as of other policies. `allow_cache_entry_mutation` is on: a result that is changed in
  /// place after all is computed again.
  SelectiveOptions selective{};
};

/// Keeps, of each region, the results that spare a recompute the most time and take no more than
/// `options.bytes`. The first runs of a region are measured, call by call; then the best choice is
/// computed on the graph of its calls and holds for the runs that begin later, recomputes of them
/// included. Regions are told apart by name, function type, and shapes, types and `requires_grad` of
/// their inputs; those that agree in all share a profile, and must run the same calls.
///
/// A run that goes another way than the measured one keeps nothing from there on, and the next ones
/// are measured again: three times, then the region keeps nothing (with a warning). In a region
/// around, runs that are nested keep what was chosen before that region began.
///
/// Memory: profiles and choices live as long as the policy and its copies, some hundred bytes a call.
/// Threads: regions of any thread may share one policy. On an accelerator a measured run waits for
/// the device before and after each call; runs that are captured as graphs are not measured.
/// Throws: `c10::ValueError` for negative bytes or fewer than one run, and for a file of profiles that is none (one that
/// cannot be written is a warning, once); also where `|` joins two of
/// them, since neither would know what the other keeps.
REMAT_API Policy save_best(SaveBestOptions options);

/// One operator call of a region as `save_best` knows it.
struct BestCall {
  std::string op;          ///< "aten::mm.default"
  double seconds = 0;      ///< what it takes; 0 if a recompute stops before it
  int64_t bytes = 0;       ///< [bytes] of its results
  int64_t kept_bytes = 0;  ///< [bytes] that keeping it takes: less if nobody would read a result
  bool is_kept = false;    ///< as chosen, or by a policy that was joined with `|`
};

/// What `save_best` chose for one region.
struct BestChoice {
  std::string region;             ///< its name; empty if it has none
  std::vector<BestCall> calls{};  ///< of the measured run, in order
  int64_t kept_bytes = 0;         ///< [bytes] of `calls` that it keeps by its own choice
  double saved_seconds = 0;       ///< what a recompute is spared
  /// [seconds] No choice spares more. The same as `saved_seconds` where the choice is known to be the
  /// best; more where the graph is too large for that.
  double bound_seconds = 0;
};

/// The choices that hold for runs which begin now, in the order in which they were made. Empty for
/// policies that have no `save_best` in them.
REMAT_API std::vector<BestChoice> best_choices(const Policy& policy);

}  // namespace remat
