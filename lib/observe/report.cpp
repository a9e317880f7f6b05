// Bodies of report.h: reports as text.

#include "remat/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "lib/base/valid_text.h"
#include "lib/observe/report_text.h"

namespace remat {

std::string readable_bytes(int64_t bytes) {
  const auto number = static_cast<double>(bytes);
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", number / 1e3);
  if (bytes < 10'000'000'000) return fmt::format("{:.1f} MB", number / 1e6);
  return fmt::format("{:.1f} GB", number / 1e9);
}

std::string name_shown(const std::string& name) { return name.empty() ? "(no name)" : name; }

namespace {

/// A column of a table of `Row`s: its head, and the text of a cell.
template <class Row>
struct Column {
  const char* head;
  std::function<std::string(const Row&)> cell;
  bool is_shown = true;
};

// Cells with the value of a member.
const auto text = [](auto member) {
  return [=](const auto& row) { return name_shown(row.*member); };
};
const auto number = [](auto member) {
  return [=](const auto& row) { return std::to_string(row.*member); };
};
const auto bytes = [](auto member) {
  return [=](const auto& row) { return readable_bytes(row.*member); };
};
const auto ms = [](auto member) {
  return [=](const auto& row) { return fmt::format("{:.3f}", row.*member * 1e3); };
};

template <class Row>
ReportTable table_of(const std::vector<Row>& rows, std::vector<Column<Row>> columns,
                     std::string title = {}) {
  std::erase_if(columns, [](const Column<Row>& each) { return !each.is_shown; });
  ReportTable table{std::move(title), {}, {}};
  for (const Column<Row>& each : columns) table.head.push_back(each.head);
  for (const Row& row : rows) {
    table.rows.emplace_back();
    for (const Column<Row>& each : columns) table.rows.back().push_back(each.cell(row));
  }
  return table;
}

template <class Row, class Test>
bool any_of(const std::vector<Row>& rows, const Test& test) {
  return std::any_of(rows.begin(), rows.end(), test);
}

}  // namespace

std::vector<ReportTable> tables_of(const Report& report) {
  using R = RegionReport;
  using M = MoveReport;
  using E = EvictionReport;
  const bool has_devices = any_of(report.regions, [](const R& r) {
    return r.device_forward_s > 0 || r.device_recompute_s > 0;
  });
  const bool has_moves = any_of(report.evictions, [](const E& e) { return e.moves > 0; });
  std::vector<R> offloading = report.regions;
  std::erase_if(offloading, [](const R& r) {
    return r.offloaded == 0 && r.offload_fallbacks == 0 && r.bytes_inputs_offloaded == 0;
  });
  std::vector<ReportTable> tables{
      table_of<R>(report.regions,
                  {{"region", text(&R::name)},
                   {"calls", number(&R::calls)},
                   {"recomputes", number(&R::recomputes)},
                   {"stopped", number(&R::early_stops)},
                   {"dropped", bytes(&R::bytes_dropped)},
                   {"inputs", bytes(&R::bytes_inputs)},
                   {"saved", bytes(&R::bytes_saved)},
                   {"recomputed at once", bytes(&R::bytes_recompute_peak)},
                   {"forward ms", ms(&R::forward_s)},
                   {"recompute ms", ms(&R::recompute_s)},
                   {"forward ms, device", ms(&R::device_forward_s), has_devices},
                   {"recompute ms, device", ms(&R::device_recompute_s), has_devices}}),
      table_of<R>(offloading, {{"region", text(&R::name)},
                               {"offloaded", number(&R::offloaded)},
                               {"not possible", number(&R::offload_fallbacks)},
                               {"bytes offloaded", bytes(&R::bytes_offloaded)},
                               {"inputs offloaded", bytes(&R::bytes_inputs_offloaded)},
                               {"brought back", number(&R::offload_loads)},
                               {"ahead", number(&R::offload_loads_ahead)},
                               {"bytes back", bytes(&R::bytes_loaded)},
                               {"offload ms", ms(&R::offload_wait_s)}}),
      table_of<M>(report.moves, {{"moved by a plan", text(&M::name)},
                                 {"moved", number(&M::moves)},
                                 {"bytes moved", bytes(&M::bytes_moved)},
                                 {"brought back", number(&M::loads)},
                                 {"ahead", number(&M::loads_ahead)},
                                 {"bytes back", bytes(&M::bytes_loaded)},
                                 {"moving ms", ms(&M::wait_s)}}),
      table_of<E>(report.evictions,
                  {{"operator", text(&E::op)},
                   {"results dropped", number(&E::evictions)},
                   {"bytes dropped", bytes(&E::bytes_evicted)},
                   {"moved", number(&E::moves), has_moves},
                   {"bytes moved", bytes(&E::bytes_moved), has_moves},
                   {"calls again", number(&E::reruns)},
                   {"bytes again", bytes(&E::bytes_rerun)},
                   {"ms again", ms(&E::rerun_s)}},
                  "Operators under a byte budget")};
  const bool is_empty = report.regions.empty() && report.evictions.empty();
  std::erase_if(tables, [&](const ReportTable& each) {
    return each.rows.empty() && !(is_empty && &each == tables.data());
  });
  return tables;
}

std::optional<Slice> slice_of(const Event& event) {
  using Kind = Slice::Kind;
  const auto slice = [&](Kind kind, const std::string& name, std::string_view end = "returned") {
    return Slice{kind,          name,         event.begin_ns,
                 event.time_ns, event.thread, event.region,
                 event.depth,   event.number, end};
  };
  switch (event.kind) {
    case EventKind::RegionEnds:
      return slice(Kind::Forward, name_shown(*event.text));
    case EventKind::RegionThrows:
      return slice(Kind::Forward, name_shown(*event.text), "threw");
    case EventKind::RecomputeEnds:
      return slice(Kind::Recompute, name_shown(*event.text));
    case EventKind::RecomputeStops:
      return slice(Kind::Recompute, name_shown(*event.text), "stopped early");
    case EventKind::RecomputeThrows:
      return slice(Kind::Recompute, name_shown(*event.text), "threw");
    case EventKind::Operator:
      return slice(Kind::Operator, *event.text);
    case EventKind::Rerun:
      return slice(Kind::Rerun, *event.text);
    case EventKind::FileWrite:
      return slice(Kind::File, "write to a file");
    case EventKind::FileRead:
      return slice(Kind::File, "read from a file");
    case EventKind::FileWait:
      return slice(Kind::FileWait, "wait for a file");
    default:
      return std::nullopt;
  }
}

Slice slice_of(const DeviceBar& bar) {
  const auto slice = [&](Slice::Kind kind, const std::string& name) {
    return Slice{kind,       name, bar.begin_ns, bar.end_ns, bar.stream.id(),
                 bar.region, 0,    bar.bytes,    {},         bar.stream.device()};
  };
  if (bar.kind == DeviceBar::Kind::CopyOut) return slice(Slice::Kind::Copy, "copy to the host");
  if (bar.kind == DeviceBar::Kind::CopyIn) return slice(Slice::Kind::Copy, "copy from the host");
  return slice(
      bar.kind == DeviceBar::Kind::Recompute ? Slice::Kind::Recompute : Slice::Kind::Forward,
      name_shown(*bar.name));
}

std::string text_of(const FailedAllocation& f) {
  std::string note =
      fmt::format("An allocation{} did not fit on {} beside {} alive: parameters of regions {}",
                  f.asked_bytes < 0 ? "" : " of " + readable_bytes(f.asked_bytes), f.device.str(),
                  readable_bytes(f.live_bytes), readable_bytes(f.parameters_bytes));
  int64_t rest = f.live_bytes - f.parameters_bytes;
  for (const FailedAllocation::Held& h : f.held) {
    note += fmt::format("; {} ({} of them): inputs {}, saved {}, recomputed {}",
                        name_shown(h.region), h.regions, readable_bytes(h.inputs_bytes),
                        readable_bytes(h.saved_bytes), readable_bytes(h.recomputed_bytes));
    rest -= h.inputs_bytes + h.saved_bytes + h.recomputed_bytes;
  }
  return note + fmt::format("; other {}.", readable_bytes(std::max<int64_t>(rest, 0)));
}

std::vector<std::string> notes_of(const Report& report) {
  std::vector<std::string> notes;
  if (!report.evictions.empty()) {
    EvictionReport all;
    for (const EvictionReport& e : report.evictions) {
      all.evictions += e.evictions;
      all.bytes_evicted += e.bytes_evicted;
      all.moves += e.moves;
      all.bytes_moved += e.bytes_moved;
      all.reruns += e.reruns;
      all.rerun_s += e.rerun_s;
    }
    notes.push_back(fmt::format(
        "Budget: {} results of {} were dropped, and {} calls ran again in {:.3f} ms.",
        all.evictions, readable_bytes(all.bytes_evicted), all.reruns, all.rerun_s * 1e3));
    if (all.moves > 0)
      notes.push_back(fmt::format("Budget: {} results of {} were moved instead of dropped.",
                                  all.moves, readable_bytes(all.bytes_moved)));
  }
  if (const FileReport& f = report.files; f.bytes_written > 0 || f.bytes_read > 0)
    notes.push_back(fmt::format(
        "Files: written {} in {:.3f} ms, read back {} in {:.3f} ms; the program's own threads were "
        "held up by that for {:.3f} ms ({} times).",
        readable_bytes(f.bytes_written), f.write_s * 1e3, readable_bytes(f.bytes_read),
        f.read_s * 1e3, f.waited_s * 1e3, f.waits));
  for (const RegionReport& r : report.regions)
    for (const DecisionReport& d : r.decisions)
      notes.push_back(fmt::format("{}: {} {}, {} calls, {}: {}", name_shown(r.name), d.outcome,
                                  d.op, d.calls, readable_bytes(d.bytes), d.reason));
  for (const DeviceReport& d : report.devices) {
    std::string note =
        fmt::format("{}: at most {} alive at once{}", d.device.str(), readable_bytes(d.peak_bytes),
                    d.is_exact ? "" : ", as its allocator rounds them");
    if (d.bytes_out > 0 || d.bytes_in > 0)
      note += fmt::format(
          "; copied to the host {} in {:.3f} ms, back {} in {:.3f} ms, "
          "waited for what was not back {:.3f} ms",
          readable_bytes(d.bytes_out), d.copies_out_s * 1e3, readable_bytes(d.bytes_in),
          d.copies_in_s * 1e3, d.waited_s * 1e3);
    notes.push_back(note + ".");
  }
  for (const FailedAllocation& each : report.failed_allocations) notes.push_back(text_of(each));
  return notes;
}

namespace {

/// Returns the table in columns, the first one to the left.
std::string text_of(const ReportTable& table) {
  std::vector<std::size_t> widths;
  for (const std::string& name : table.head) widths.push_back(name.size());
  for (const auto& row : table.rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  const auto add = [&](const std::vector<std::string>& row) {
    text += fmt::format("{:<{}}", row[0], widths[0]);
    for (std::size_t i = 1; i < row.size(); ++i) text += fmt::format("  {:>{}}", row[i], widths[i]);
    text += '\n';
  };
  add(table.head);
  for (const auto& row : table.rows) add(row);
  return text;
}

}  // namespace

std::string Report::to_string() const {
  std::string text;
  for (const ReportTable& table : tables_of(*this)) {
    if (!text.empty()) text += '\n';
    text += text_of(table);
    if (table.rows.empty()) text += "no region ran\n";
  }
  for (const std::string& note : notes_of(*this)) (text += note) += '\n';
  if (dropped_events > 0)
    text += fmt::format(
        "The oldest {} events are gone: RecorderOptions::max_events was reached. Sums count "
        "them.\n",
        dropped_events);
  return valid_text(text);
}

}  // namespace remat
