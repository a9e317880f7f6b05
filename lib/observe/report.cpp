// Bodies of report.h: the counters, and reports as text.

#include "remat/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "lib/base/counters.h"
#include "lib/base/valid_text.h"
#include "lib/observe/report_text.h"

namespace remat {

Counters counters() {
  const auto now = [](const std::atomic<int64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  // Read first, so that no ended frame is counted before its begin.
  const int64_t frames_ended = now(live_counters.frames_ended);
  const int64_t frames_created = now(live_counters.frames_created);
  return {.frames_created = frames_created,
          .frames_alive = frames_created - frames_ended,
          .recomputes = now(live_counters.recomputes),
          .early_stops = now(live_counters.early_stops),
          .tensors_dropped = now(live_counters.tensors_dropped),
          .tensors_recomputed = now(live_counters.tensors_recomputed),
          .recomputed_bytes_alive = now(live_counters.recomputed_bytes_alive)};
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : valid_text(text)) {
    if (c == '"' || c == '\\')
      (out += '\\') += c;
    else if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      out += c;
  }
  return out += '"';
}

std::string xml_text(std::string_view text) {
  std::string out;
  for (const char c : valid_text(text)) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out;
}

std::string readable_bytes(int64_t bytes) {
  const auto number = static_cast<double>(bytes);
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  if (bytes < 10'000'000) return fmt::format("{:.1f} kB", number / 1e3);
  if (bytes < 10'000'000'000) return fmt::format("{:.1f} MB", number / 1e6);
  return fmt::format("{:.1f} GB", number / 1e9);
}

std::string name_shown(const std::string& name) { return name.empty() ? "(no name)" : name; }

std::vector<ReportTable> tables_of(const Report& report) {
  ReportTable regions{"",
                      {"region", "calls", "recomputes", "stopped", "dropped", "inputs", "saved",
                       "recomputed at once", "forward ms", "recompute ms"},
                      {}};
  ReportTable moved{"",
                    {"region", "offloaded", "not possible", "bytes offloaded", "inputs offloaded",
                     "brought back", "ahead", "bytes back", "offload ms"},
                    {}};
  const bool has_devices = std::any_of(
      report.regions.begin(), report.regions.end(),
      [](const RegionReport& r) { return r.device_forward_s > 0 || r.device_recompute_s > 0; });
  if (has_devices)
    regions.head.insert(regions.head.end(), {"forward ms, device", "recompute ms, device"});
  for (const RegionReport& r : report.regions) {
    std::vector<std::string> row{name_shown(r.name),
                                 std::to_string(r.calls),
                                 std::to_string(r.recomputes),
                                 std::to_string(r.early_stops),
                                 readable_bytes(r.bytes_dropped),
                                 readable_bytes(r.bytes_inputs),
                                 readable_bytes(r.bytes_saved),
                                 readable_bytes(r.bytes_recompute_peak),
                                 fmt::format("{:.3f}", r.forward_s * 1e3),
                                 fmt::format("{:.3f}", r.recompute_s * 1e3)};
    if (has_devices)
      for (const double seconds : {r.device_forward_s, r.device_recompute_s})
        row.push_back(fmt::format("{:.3f}", seconds * 1e3));
    regions.rows.push_back(std::move(row));
    if (r.offloaded == 0 && r.offload_fallbacks == 0 && r.bytes_inputs_offloaded == 0) continue;
    moved.rows.push_back({name_shown(r.name), std::to_string(r.offloaded),
                          std::to_string(r.offload_fallbacks), readable_bytes(r.bytes_offloaded),
                          readable_bytes(r.bytes_inputs_offloaded), std::to_string(r.offload_loads),
                          std::to_string(r.offload_loads_ahead), readable_bytes(r.bytes_loaded),
                          fmt::format("{:.3f}", r.offload_wait_s * 1e3)});
  }
  std::vector<ReportTable> tables;
  if (!regions.rows.empty() || report.evictions.empty()) tables.push_back(std::move(regions));
  if (!moved.rows.empty()) tables.push_back(std::move(moved));
  ReportTable planned{"",
                      {"moved by a plan", "moved", "bytes moved", "brought back", "ahead",
                       "bytes back", "moving ms"},
                      {}};
  for (const MoveReport& m : report.moves)
    planned.rows.push_back({m.name, std::to_string(m.moves), readable_bytes(m.bytes_moved),
                            std::to_string(m.loads), std::to_string(m.loads_ahead),
                            readable_bytes(m.bytes_loaded), fmt::format("{:.3f}", m.wait_s * 1e3)});
  if (!planned.rows.empty()) tables.push_back(std::move(planned));
  ReportTable dropped{
      "Operators under a byte budget",
      {"operator", "results dropped", "bytes dropped", "calls again", "bytes again", "ms again"},
      {}};
  const bool has_moves = std::any_of(report.evictions.begin(), report.evictions.end(),
                                     [](const EvictionReport& e) { return e.moves > 0; });
  if (has_moves) dropped.head.insert(dropped.head.begin() + 3, {"moved", "bytes moved"});
  for (const EvictionReport& e : report.evictions) {
    auto& row = dropped.rows.emplace_back(
        std::vector<std::string>{e.op, std::to_string(e.evictions), readable_bytes(e.bytes_evicted),
                                 std::to_string(e.reruns), readable_bytes(e.bytes_rerun),
                                 fmt::format("{:.3f}", e.rerun_s * 1e3)});
    if (has_moves)
      row.insert(row.begin() + 3, {std::to_string(e.moves), readable_bytes(e.bytes_moved)});
  }
  if (!dropped.rows.empty()) tables.push_back(std::move(dropped));
  return tables;
}

std::string name_of(const DeviceBar& bar) {
  switch (bar.kind) {
    case DeviceBar::Kind::CopyOut:
      return "copy to the host";
    case DeviceBar::Kind::CopyIn:
      return "copy from the host";
    default:
      return name_shown(*bar.name);
  }
}

const char* file_work_of(const Event& event) {
  switch (event.kind) {
    case EventKind::FileWrite:
      return "write to a file";
    case EventKind::FileRead:
      return "read from a file";
    case EventKind::FileWait:
      return "wait for a file";
    default:
      return nullptr;
  }
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
  for (const FailedAllocation& f : report.failed_allocations) {
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
    notes.push_back(note + fmt::format("; other {}.", readable_bytes(std::max<int64_t>(rest, 0))));
  }
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
        "The oldest {} events are gone: RecorderOptions::max_events was reached. Sums count them.\n",
        dropped_events);
  return valid_text(text);
}

std::string Report::to_json() const {
  std::string text = "{\"regions\": [";
  const char* comma = "";
  for (const RegionReport& r : regions) {
    text += fmt::format(
        "{}\n  {{\"name\": {}, \"calls\": {}, \"recomputes\": {}, \"early_stops\": {}, "
        "\"bytes_dropped\": {}, \"bytes_inputs\": {}, \"bytes_saved\": {}, "
        "\"bytes_recompute_peak\": {}, \"offloaded\": {}, \"offload_fallbacks\": {}, "
        "\"bytes_offloaded\": {}, \"bytes_inputs_offloaded\": {}, \"offload_loads\": {}, "
        "\"offload_loads_ahead\": {}, \"bytes_loaded\": {}, \"offload_wait_s\": {:.9f}, "
        "\"forward_s\": {:.9f}, \"recompute_s\": {:.9f}, \"device_forward_s\": {:.9f}, "
        "\"device_recompute_s\": {:.9f}, \"decisions\": [",
        comma, json_string(r.name), r.calls, r.recomputes, r.early_stops, r.bytes_dropped,
        r.bytes_inputs, r.bytes_saved, r.bytes_recompute_peak, r.offloaded, r.offload_fallbacks,
        r.bytes_offloaded, r.bytes_inputs_offloaded, r.offload_loads, r.offload_loads_ahead,
        r.bytes_loaded, r.offload_wait_s, r.forward_s, r.recompute_s, r.device_forward_s,
        r.device_recompute_s);
    const char* inner = "";
    for (const DecisionReport& d : r.decisions) {
      text += fmt::format(
          "{}\n    {{\"op\": {}, \"outcome\": {}, \"reason\": {}, \"calls\": {}, \"bytes\": {}}}",
          inner, json_string(d.op), json_string(d.outcome), json_string(d.reason), d.calls,
          d.bytes);
      inner = ",";
    }
    text += "]}";
    comma = ",";
  }
  text += "\n], \"devices\": [";
  comma = "";
  for (const DeviceReport& d : devices) {
    text += fmt::format(
        "{}\n  {{\"device\": {}, \"is_exact\": {}, \"peak_bytes\": {}, \"bytes_out\": {}, "
        "\"bytes_in\": {}, \"copies_out_s\": {:.9f}, \"copies_in_s\": {:.9f}, "
        "\"waited_s\": {:.9f}}}",
        comma, json_string(d.device.str()), d.is_exact, d.peak_bytes, d.bytes_out, d.bytes_in,
        d.copies_out_s, d.copies_in_s, d.waited_s);
    comma = ",";
  }
  text += "], \"failed_allocations\": [";
  comma = "";
  for (const FailedAllocation& f : failed_allocations) {
    text += fmt::format(
        "{}\n  {{\"device\": {}, \"asked_bytes\": {}, \"live_bytes\": {}, "
        "\"parameters_bytes\": {}, \"held\": [",
        comma, json_string(f.device.str()), f.asked_bytes, f.live_bytes, f.parameters_bytes);
    const char* inner = "";
    for (const FailedAllocation::Held& h : f.held) {
      text += fmt::format(
          "{}\n    {{\"region\": {}, \"regions\": {}, \"inputs_bytes\": {}, \"saved_bytes\": {}, "
          "\"recomputed_bytes\": {}}}",
          inner, json_string(h.region), h.regions, h.inputs_bytes, h.saved_bytes,
          h.recomputed_bytes);
      inner = ",";
    }
    text += "]}";
    comma = ",";
  }
  text += "], \"moves\": [";
  comma = "";
  for (const MoveReport& m : moves) {
    text += fmt::format(
        "{}\n  {{\"name\": {}, \"moves\": {}, \"bytes_moved\": {}, \"loads\": {}, "
        "\"loads_ahead\": {}, \"bytes_loaded\": {}, \"wait_s\": {:.9f}}}",
        comma, json_string(m.name), m.moves, m.bytes_moved, m.loads, m.loads_ahead, m.bytes_loaded,
        m.wait_s);
    comma = ",";
  }
  text += "], \"evictions\": [";
  comma = "";
  for (const EvictionReport& e : evictions) {
    text += fmt::format(
        "{}\n  {{\"op\": {}, \"evictions\": {}, \"bytes_evicted\": {}, \"reruns\": {}, "
        "\"bytes_rerun\": {}, \"rerun_s\": {:.9f}, \"moves\": {}, \"bytes_moved\": {}}}",
        comma, json_string(e.op), e.evictions, e.bytes_evicted, e.reruns, e.bytes_rerun, e.rerun_s,
        e.moves, e.bytes_moved);
    comma = ",";
  }
  return text +
         fmt::format(
             "], \"files\": {{\"bytes_written\": {}, \"bytes_read\": {}, \"write_s\": {:.9f}, "
             "\"read_s\": {:.9f}, \"waits\": {}, \"waited_s\": {:.9f}}}, "
             "\"dropped_events\": {}}}\n",
             files.bytes_written, files.bytes_read, files.write_s, files.read_s, files.waits,
             files.waited_s, dropped_events);
}

}  // namespace remat
