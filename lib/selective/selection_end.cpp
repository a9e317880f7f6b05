// The end of a region's forward for its kept results: releases unread results, and reports to
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
  // The read of a placeholder ends the recompute by an exception, which cannot leave a noexcept
  // function.
  const bool may_have_placeholders = frame_.region().body->can_be_stopped();
  sources_.visit([&](const ValueSources::Notes& notes) {
    if (notes.kept == ValueSources::Notes::not_kept) return;
    const ResultIndex& place = kept_results_[notes.kept];
    KeptTensor& kept =
        record_.operators[place.op].calls[place.call]->kept[place.result].tensors[place.tensor];
    if (auto holders = kept.settle(!may_have_placeholders || notes.is_read))
      freed.holders.push_back(std::move(*holders));
  });
  kept_results_ = {};  // clear() would keep the memory
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
      if (decided.bytes == 0) decided.reason += ", nobody reads it";
    } else if (is_keeping(each.answer)) {
      decided.reason += each.against == nullptr ? ", but it is written to, or cannot be given again"
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
