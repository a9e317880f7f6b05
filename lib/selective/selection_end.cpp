// The end of a region's forward for its kept results: releases the last results, and reports to
// recorders.

#include <fmt/format.h>

#include <array>
#include <exception>
#include <string_view>
#include <utility>

#include "hooks/depot/depot.h"
#include "lib/selective/selection.h"

namespace remat {

void Selection::settle() {
  std::vector<KeptTensor::Unfinished> unfinished;
  {
    Freed freed;
    std::lock_guard<SpinLock> lock(record_.mutex);
    // A recompute stops before the calls that follow the last saved tensor, or runs them again.
    const Region& region = frame_.region();
    if (region.options.early_stop && region.body->can_be_stopped()) {
      if (rule_ != nullptr) record_.let_go_from(calls_at_last_save_, freed);
      // A recompute that must write to buffers runs on.
      const UserState* const state = frame_.surroundings().user_state();
      if (state == nullptr || !state->is_compared())
        record_.let_go_regions_from(pins_at_last_save_, freed);
    }
    slot_sources_.clear();
    record_.end_forward(unfinished, freed);
  }
  std::exception_ptr failure;
  for (const auto& each : unfinished) {
    try {
      // The device's next work may write to an original that is still being copied.
      if (each.is_written_to)
        each.piece->finish_store();
      else
        each.piece->check_arrival();
      each.piece->set_must_arrive(false);  // a read succeeds wherever the data are
    } catch (const std::exception&) {
      if (failure == nullptr) failure = std::current_exception();
    }
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  if (moves_) moves_->move_excess();
}

void Selection::add_to(recording::RegionSums& sums) const {
  constexpr std::array<std::string_view, 6> answers{"MustSave",       "PreferSave",
                                                    "MustRecompute",  "PreferRecompute",
                                                    "MustCpuOffload", "PreferCpuOffload"};
  for (const Decision& each : decisions_) {
    const OpRecord& op = record_.operators[each.call.op];
    const CallRecord* const record = op.calls[each.call.call].get();
    recording::DecidedCall decided{op.traits->name, "recomputed", {}, 0};
    decided.reason = answers[static_cast<std::size_t>(each.answer)];
    if (record != nullptr && record->is_kept) {
      bool is_moved = false, is_late = false;
      for (const KeptResult& result : record->kept)
        for (const KeptTensor& kept : result.tensors) {
          decided.bytes += kept.num_bytes();
          is_moved = is_moved || kept.is_on_cpu_instead();
          is_late = is_late || kept.is_among_last();
        }
      decided.outcome = is_moved ? "moved" : "kept";
      if (is_late) decided.reason += ", when it is not among the last";
      if (!is_keeping(each.answer)) decided.reason = "a name";
    } else if (is_keeping(each.answer)) {
      decided.reason +=
          each.against == nullptr
              ? ", but no recompute reads it, it is written to, or it cannot be given again"
              : fmt::format(", but it {}", each.against);
    }
    sums.decisions.push_back(std::move(decided));
  }
  record_.visit_kept([&](const KeptTensor& kept) {
    if (const int64_t bytes = kept.num_bytes(); bytes > 0)
      remat::add_to(sums.saved, kept.is_on_cpu_instead() ? c10::kCPU : kept.device(), bytes);
    // A result that may stay is counted when it moves.
    const bool is_moved = kept.is_on_cpu_instead() && !kept.is_among_last();
    sums.offloaded += is_moved ? 1 : 0;
    sums.bytes_offloaded += is_moved ? kept.num_bytes() : 0;
    sums.offload_fallbacks += kept.could_not_move() ? 1 : 0;
  });
  if (moves_) sums.offload_wait_s += 1e-9 * static_cast<double>(moves_->spent_ns());
}

}  // namespace remat
