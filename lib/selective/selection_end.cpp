// The end of a region's forward for its kept results: releases unread results, and reports to
// recorders.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string_view>
#include <utility>

#include "hooks/depot/depot.h"
#include "lib/selective/selection.h"

namespace remat {

void Selection::settle() {
  std::vector<KeptTensor::Unfinished> unfinished;
  end_forward(unfinished);
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

void Selection::end_forward(std::vector<KeptTensor::Unfinished>& unfinished) {
  Freed freed;
  std::lock_guard<SpinLock> lock(record_.mutex);
  let_go_of_unread(freed);
  kept_results_ = {};  // clear() would keep the room
  sources_.clear();
  slot_sources_.clear();
  for (OpRecord& op : record_.operators)
    for (auto& call : op.calls) {
      if (call == nullptr) continue;
      if (call->is_kept) {
        call->results.clear();
        for (KeptResult& result : call->kept)
          for (KeptTensor& kept : result.tensors)
            if (auto each = kept.end_forward(); each.piece != nullptr)
              unfinished.push_back(std::move(each));
      } else {
        const bool is_let_go = call->is_let_go;
        freed.records.push_back(std::exchange(call, is_let_go ? make_record() : nullptr));
        if (is_let_go) call->is_let_go = true;
      }
    }
  record_.is_settled = true;
}

/// Releases the results of calls after the last saved tensor that no later call reads, unless that
/// is kept. A recompute stops before such a call; one that does not stop there runs it again.
void Selection::let_go_of_unread(Freed& freed) {
  const Region& region = frame_.region();
  if (!region.options.early_stop || !region.body->can_be_stopped()) return;
  std::vector<uint32_t> call_after;
  for (const OpRecord& op : record_.operators)
    call_after.push_back(static_cast<uint32_t>(op.calls.size()));
  for (std::size_t i = record_.sequence.size(); i-- > calls_at_last_save_;) {
    const uint32_t op = record_.sequence[i], number = --call_after[op];
    const CallRecord* const call = record_.operators[op].calls[number].get();
    if (call == nullptr || !call->is_kept || call->is_applied) continue;
    const bool is_read = std::any_of(call->kept.begin(), call->kept.end(), [&](const auto& each) {
      return std::any_of(each.tensors.begin(), each.tensors.end(), [&](const KeptTensor& tensor) {
        const ValueSources::Notes* const notes = sources_.notes_of(tensor.storage());
        return notes != nullptr && notes->is_read;
      });
    });
    if (!is_read) let_go({op, number, 0, 0}, freed);
  }
}

void Selection::add_to(recording::RegionSums& sums) const {
  constexpr std::array<std::string_view, 6> answers{"MustSave",       "PreferSave",
                                                    "MustRecompute",  "PreferRecompute",
                                                    "MustCpuOffload", "PreferCpuOffload"};
  for (const Decision& each : decisions_) {
    const OpRecord& op = record_.operators[each.op];
    const CallRecord* const record = op.calls[each.call].get();
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
      decided.reason += each.against == nullptr ? ", but nothing reads it, it is written to, or it cannot be given again"
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
