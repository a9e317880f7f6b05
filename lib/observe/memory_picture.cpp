// memory_picture(): live bytes over time, and the regions of that time.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "lib/observe/report_text.h"

namespace remat {

namespace {

constexpr double kWidth = drawing_width, kLeft = 90, kRight = 1050, kTop = 70, kBottom = 380;
constexpr double kBarHeight = 15, kBarGap = 3;
constexpr double kLetterWidth = 6.5;  // of the names in bars, at most
constexpr int kColumns = 480;

struct Kind {
  const char* name;
  const char* color;
};

// From the bottom up.
constexpr std::array<Kind, 5> kKinds{{{"parameters that regions use", "#9aa5b1"},
                                      {"inputs kept", "#2f6f9f"},
                                      {"saved by policy", "#5aa469"},
                                      {"recomputed", "#e08a3c"},
                                      {"other", "#d9d2c5"}}};
constexpr std::size_t kOther = kKinds.size() - 1;
using Stack = std::array<int64_t, kKinds.size()>;

/// Returns the bytes of each kind. Upper kinds get their bytes first, so that inexact ones (a
/// parameter's bytes, for example) never make a stack higher than the live bytes.
Stack stack_of(const LiveKinds& b) {
  Stack stack{b.parameters, b.inputs, b.saved, b.recomputed, 0};
  int64_t rest = std::max<int64_t>(b.live, 0);
  for (std::size_t i = kOther; i-- > 0;) {
    stack[i] = std::clamp<int64_t>(stack[i], 0, rest);
    rest -= stack[i];
  }
  stack[kOther] = rest;
  return stack;
}

struct Bar {
  double from_ms, to_ms;
  std::string color, name, title;
  int64_t depth;
  int64_t lane;  ///< thread or stream
};

constexpr const char* kForward = "#2f6f9f";
constexpr const char* kRecompute = "#e08a3c";
constexpr const char* kCopy = "#8c6bb1";
constexpr const char* kWait = "#b5473c";
constexpr const char* kAgain = "#b8860b";
constexpr const char* kDropped = "#6b7280";
constexpr const char* kBudget = "#b00000";

double ms_of(int64_t ns) { return static_cast<double>(ns) / 1e6; }

Bar bar_of(const DeviceBar& bar) {
  const double from = ms_of(bar.begin_ns), to = ms_of(bar.end_ns);
  const std::string name = name_of(bar);
  const bool is_copy = bar.bytes > 0 || bar.name == nullptr;
  const bool is_recompute = bar.kind == DeviceBar::Kind::Recompute;
  const char* const color = is_copy ? kCopy : is_recompute ? kRecompute : kForward;
  const std::string what = is_copy        ? readable_bytes(bar.bytes)
                           : is_recompute ? "recompute"
                                          : "forward";
  return {from,
          to,
          color,
          name,
          fmt::format("{} {} on {}: {:.3f} ms", name, what, bar.stream.device().str(), to - from),
          0,
          bar.stream.id()};
}

/// Adds the operators that run again under a budget, and the results that it drops, in rows of
/// their own. Bars within one unit of the picture are joined.
void add_budget_bars(const std::vector<Event>& events, double last_ms, std::vector<Bar>& bars) {
  constexpr int64_t lanes_below = 1'000'000;  // threads have fewer
  struct Joined {
    std::size_t place = 0;
    int64_t count = 0, bytes = 0;
  };
  std::map<int64_t, Joined> by_lane;
  for (const Event& event : events) {
    const bool is_again = event.kind == EventKind::Rerun;
    if (!is_again && event.kind != EventKind::Eviction && event.kind != EventKind::MoveAway)
      continue;
    const double to = ms_of(event.time_ns), from = is_again ? ms_of(event.begin_ns) : to;
    const int64_t lane = lanes_below + 2 * event.thread + (is_again ? 0 : 1);
    Joined& joined = by_lane[lane];
    if (joined.count == 0 || to - bars[joined.place].from_ms > last_ms / (kRight - kLeft)) {
      joined = {bars.size(), 0, 0};
      bars.push_back({from, to, is_again ? kAgain : kDropped, *event.text, "", 0, lane});
    }
    Bar& bar = bars[joined.place];
    bar.to_ms = to;
    joined.bytes += event.number;
    const std::string what =
        joined.count++ == 0 ? *event.text : fmt::format("{} operators", joined.count);
    bar.title =
        is_again ? fmt::format("{} again for a budget: {} in {:.3f} ms", what,
                               readable_bytes(joined.bytes), to - bar.from_ms)
                 : fmt::format("dropped by a budget: {} of {}", readable_bytes(joined.bytes), what);
  }
}

std::vector<Bar> bars_of(const Timeline& timeline, double last_ms) {
  std::vector<Bar> bars;
  add_budget_bars(timeline.events, last_ms, bars);
  for (const DeviceBar& each : timeline.bars) bars.push_back(bar_of(each));
  for (const Event& event : timeline.events) {
    const double from = ms_of(event.begin_ns), to = ms_of(event.time_ns);
    if (const char* const work = file_work_of(event))
      bars.push_back(
          {from, to, event.kind == EventKind::FileWait ? kWait : kCopy, work,
           fmt::format("{}: {} in {:.3f} ms", work, readable_bytes(event.number), to - from), 0,
           event.thread});
    const std::optional<Span> span = span_of(event);
    if (!span) continue;
    const std::string name = name_shown(*event.text);
    const std::string end = span->end == "returned" ? "" : fmt::format(", {}", span->end);
    bars.push_back({from, to, span->is_recompute ? kRecompute : kForward, name,
                    fmt::format("{} {}: {:.3f} ms{}", name,
                                span->is_recompute ? "recompute" : "forward", to - from, end),
                    0, event.thread});
  }
  // Rows: a bar inside another bar of its thread or stream goes below it.
  std::sort(bars.begin(), bars.end(), [](const Bar& a, const Bar& b) {
    return std::tuple(a.lane, a.from_ms, -a.to_ms) < std::tuple(b.lane, b.from_ms, -b.to_ms);
  });
  std::vector<const Bar*> open;
  for (Bar& bar : bars) {
    while (!open.empty() && (open.back()->lane != bar.lane || open.back()->to_ms <= bar.from_ms))
      open.pop_back();
    bar.depth = static_cast<int64_t>(open.size());
    open.push_back(&bar);
  }
  return bars;
}

/// Returns the line of the allocator's bytes, in its sizes, from one report to the next. Between
/// reports, and after allocations of threads without reports, the line keeps its last height.
template <class Place>
std::string line_of_allocations(const std::vector<Event>& events, const Place& place_of) {
  std::string points;
  double level = 0, column = -1, low = 0, high = 0;
  for (const Event& event : events) {
    if (event.kind != EventKind::Allocation) continue;
    const auto [x, y] = place_of(event);
    // Within half a unit, only the lowest, the highest and the last point are visible.
    if (points.empty() || x - column >= 0.5) {
      if (!points.empty()) points += fmt::format("{:.1f},{:.1f} ", x, level);
      column = x;
      low = high = y;
      points += fmt::format("{:.1f},{:.1f} ", x, y);
    } else if (y < low || y > high) {
      low = std::min(low, y);
      high = std::max(high, y);
      points += fmt::format("{:.1f},{:.1f} ", column, y);
    }
    level = y;
  }
  if (points.empty()) return {};
  return fmt::format(
      "<polyline points=\"{}\" fill=\"none\" stroke=\"#7b2d26\" stroke-width=\"1\"/>\n<text x=\"{}\" "
      "y=\"{}\" text-anchor=\"end\" fill=\"#7b2d26\">line: given out by the allocator, in its sizes</text>\n",
      points, kRight, kTop - 6);
}

/// A time with one limit of the live bytes.
struct Limit {
  double from_ms, to_ms;
  int64_t bytes;
};
std::vector<Limit> limits_of(const std::vector<Event>& events, double last_ms) {
  std::vector<Limit> limits;
  for (const Event& event : events) {
    if (event.kind != EventKind::Budget) continue;
    const double ms = ms_of(event.time_ns);
    if (!limits.empty()) limits.back().to_ms = std::min(limits.back().to_ms, ms);
    limits.push_back({ms, last_ms, event.number});
  }
  std::erase_if(limits, [](const Limit& each) { return each.bytes == recording::no_budget; });
  return limits;
}

double nice_step(double top) {
  const double rough = top / 5, power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough) return factor * power;
  return 10 * power;
}

}  // namespace

std::vector<Timeline> timelines_of(Recording& recording) {
  std::vector<Timeline> timelines{{c10::kCPU, {}, {}}};
  const auto of = [&](c10::Device device) -> Timeline& {
    for (Timeline& each : timelines)
      if (each.device == device) return each;
    return timelines.emplace_back(Timeline{device, {}, {}});
  };
  for (Event& event : recording.events()) of(event.device).events.push_back(std::move(event));
  for (DeviceBar& bar : recording.bars()) of(bar.stream.device()).bars.push_back(std::move(bar));
  std::sort(timelines.begin() + 1, timelines.end(), [](const Timeline& a, const Timeline& b) {
    return a.device.index() < b.device.index();
  });
  return timelines;
}

double last_ms_of(const std::vector<Timeline>& timelines) {
  double last_ms = 1e-6;
  for (const Timeline& timeline : timelines) {
    for (const Event& event : timeline.events) last_ms = std::max(last_ms, ms_of(event.time_ns));
    for (const DeviceBar& bar : timeline.bars) last_ms = std::max(last_ms, ms_of(bar.end_ns));
  }
  return last_ms;
}

Drawing memory_picture(const Timeline& timeline, double last_ms, double top_of_drawing) {
  const std::vector<Event>& events = timeline.events;
  // Bytes that are alive all the time, and are no region's, would only press the rest flat.
  int64_t peak = 1, lasting = std::numeric_limits<int64_t>::max();
  for (const Event& event : events) {
    if (!has_bytes(event)) continue;
    peak = std::max(peak, event.bytes.live);
    lasting = std::min(lasting, stack_of(event.bytes)[kOther]);
  }
  if (lasting > peak) lasting = 0;  // no event
  int64_t top = std::max<int64_t>(peak - lasting, 1);
  for (const Event& event : events)
    if (event.kind == EventKind::Allocation) top = std::max(top, event.bytes.live - lasting);
  // A budget far above all live bytes would press the rest flat, too.
  const std::vector<Limit> limits = limits_of(events, last_ms);
  const int64_t highest_limit = lasting + 2 * (peak - lasting);
  for (const Limit& each : limits)
    if (each.bytes <= highest_limit) top = std::max(top, each.bytes - lasting);
  const std::vector<Bar> bars = bars_of(timeline, last_ms);
  // One row for each depth of a thread or stream.
  std::map<std::pair<int64_t, int64_t>, int64_t> rows;
  for (const Bar& bar : bars) rows.try_emplace({bar.lane, bar.depth}, 0);
  int64_t num_rows = 0;
  for (auto& [place, row] : rows) row = num_rows++;
  const double bars_top = kBottom + 45;
  const double height = bars_top + static_cast<double>(num_rows) * (kBarHeight + kBarGap) + 20;

  const auto x = [&](double ms) { return kLeft + ms / last_ms * (kRight - kLeft); };
  const auto y = [&](double bytes) {
    return kBottom - bytes / (1.05 * static_cast<double>(top)) * (kBottom - kTop);
  };

  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" y=\"{}\" viewBox=\"0 0 {} {}\" width=\"{}\" "
      "height=\"{}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#333\">\n"
      "<rect width=\"{}\" height=\"{}\" fill=\"white\"/>\n"
      "<text x=\"{}\" y=\"24\" font-size=\"16\" font-weight=\"bold\">Live bytes of {} over time, peak "
      "{}</text>\n",
      top_of_drawing, kWidth, height, kWidth, height, kWidth, height, kLeft,
      timeline.device.is_cpu() ? "CPU tensors" : "tensors on " + timeline.device.str(),
      readable_bytes(peak));
  if (lasting > 0)
    svg += fmt::format(
        "<text x=\"{}\" y=\"24\" text-anchor=\"end\">not drawn: {} of other tensors, alive all the "
        "time</text>\n",
        kRight, readable_bytes(lasting));

  double legend = kLeft;
  for (const Kind& kind : kKinds) {
    svg += fmt::format(
        "<rect x=\"{:.0f}\" y=\"38\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{:.0f}\" "
        "y=\"48\">{}</text>\n",
        legend, kind.color, legend + 17, kind.name);
    legend += 45 + 6.2 * static_cast<double>(std::char_traits<char>::length(kind.name));
  }

  const double byte_step = nice_step(static_cast<double>(top));
  for (double bytes = 0; bytes <= static_cast<double>(top); bytes += byte_step)
    svg += fmt::format(
        "<line x1=\"{}\" y1=\"{:.1f}\" x2=\"{}\" y2=\"{:.1f}\" stroke=\"#e4e4e4\"/><text x=\"{}\" "
        "y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
        kLeft, y(bytes), kRight, y(bytes), kLeft - 8, y(bytes) + 4,
        readable_bytes(static_cast<int64_t>(bytes)));
  const double ms_step = nice_step(last_ms);
  for (double ms = 0; ms <= last_ms * 1.0001; ms += ms_step)
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:g} ms</text>\n", x(ms),
                       kBottom + 18, ms);

  // Each column shows its moment with the most bytes, or the last moment before it.
  std::vector<LiveKinds> columns(kColumns);
  std::vector<bool> is_set(kColumns, false);
  std::vector<LiveKinds> last_of(kColumns);
  for (const Event& event : events) {
    if (!has_bytes(event)) continue;
    const double ms = static_cast<double>(event.time_ns) / 1e6;
    const auto column = static_cast<std::size_t>(
        std::min<double>(kColumns - 1, std::floor(ms / last_ms * kColumns)));
    if (!is_set[column] || event.bytes.live >= columns[column].live) columns[column] = event.bytes;
    is_set[column] = true;
    last_of[column] = event.bytes;
  }
  for (std::size_t i = 1; i < kColumns; ++i)
    if (!is_set[i]) columns[i] = last_of[i] = last_of[i - 1];

  std::vector<Stack> stacks;
  for (const LiveKinds& each : columns) stacks.push_back(stack_of(each));
  std::vector<double> floor_of(kColumns, 0);
  const auto column_x = [&](std::size_t i) {
    return x(static_cast<double>(i) * last_ms / kColumns);
  };
  for (std::size_t kind = 0; kind < kKinds.size(); ++kind) {
    std::string up, down;
    for (std::size_t i = 0; i < kColumns; ++i) {
      const int64_t bytes = stacks[i][kind];
      const int64_t shown = kind == kOther ? std::max<int64_t>(bytes - lasting, 0) : bytes;
      const double below = floor_of[i], above = below + static_cast<double>(shown);
      floor_of[i] = above;
      const double from = column_x(i), to = column_x(i + 1);
      up += fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", from, y(above), to, y(above));
      down = fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", to, y(below), from, y(below)) + down;
    }
    svg += fmt::format("<polygon points=\"{}{}\" fill=\"{}\"/>\n", up, down, kKinds[kind].color);
  }
  for (std::size_t i = 0; i < kColumns; ++i) {
    std::string title =
        fmt::format("{:.3f} ms: {} alive", static_cast<double>(i) * last_ms / kColumns,
                    readable_bytes(columns[i].live));
    for (std::size_t kind = 0; kind < kKinds.size(); ++kind)
      title += fmt::format("\n{}: {}", kKinds[kind].name, readable_bytes(stacks[i][kind]));
    svg += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"transparent\"><title>{}"
        "</title></rect>\n",
        column_x(i), kTop, (kRight - kLeft) / kColumns, kBottom - kTop, xml_text(title));
  }

  const Limit* labeled = nullptr;
  for (const Limit& each : limits) {
    if (each.bytes > highest_limit) continue;
    labeled = &each;
    const double level = y(static_cast<double>(std::max<int64_t>(each.bytes - lasting, 0)));
    svg += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
        "stroke-dasharray=\"6 3\"/>\n",
        x(each.from_ms), level, std::max(x(each.to_ms), x(each.from_ms) + 1), level, kBudget);
  }
  if (labeled != nullptr)
    svg += fmt::format(
        "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\" fill=\"{}\">budget: {} alive</text>\n",
        kRight, y(static_cast<double>(std::max<int64_t>(labeled->bytes - lasting, 0))) - 5, kBudget,
        readable_bytes(labeled->bytes));
  else if (!limits.empty())
    svg += fmt::format(
        "<text x=\"{}\" y=\"48\" text-anchor=\"end\" fill=\"{}\">budget: {} alive, above the "
        "picture</text>\n",
        kRight, kBudget, readable_bytes(limits.back().bytes));

  svg += line_of_allocations(events, [&](const Event& event) {
    return std::pair(x(ms_of(event.time_ns)),
                     y(static_cast<double>(std::max<int64_t>(event.bytes.live - lasting, 0))));
  });

  svg += fmt::format(
      "<text x=\"{}\" y=\"{}\" fill=\"#2f6f9f\">regions, forward</text><text x=\"{}\" "
      "y=\"{}\" fill=\"#e08a3c\">regions, recompute</text>\n",
      kLeft, bars_top - 6, kLeft + 120, bars_top - 6);
  if (std::any_of(bars.begin(), bars.end(), [](const Bar& bar) { return bar.color == kCopy; }))
    svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\">copies of offload</text>\n",
                       kLeft + 260, bars_top - 6, kCopy);
  if (std::any_of(bars.begin(), bars.end(), [](const Bar& bar) { return bar.color == kWait; }))
    svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\">waiting for files</text>\n",
                       kLeft + 390, bars_top - 6, kWait);
  if (std::any_of(bars.begin(), bars.end(), [](const Bar& bar) { return bar.color == kAgain; }))
    svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\">run again for a budget</text>\n",
                       kLeft + 510, bars_top - 6, kAgain);
  if (std::any_of(bars.begin(), bars.end(), [](const Bar& bar) { return bar.color == kDropped; }))
    svg += fmt::format("<text x=\"{}\" y=\"{}\" fill=\"{}\">dropped by a budget</text>\n",
                       kLeft + 660, bars_top - 6, kDropped);
  for (const Bar& bar : bars) {
    const auto row = static_cast<double>(rows.at({bar.lane, bar.depth}));
    const double from = x(bar.from_ms), width = std::max(x(bar.to_ms) - from, 0.5);
    const double row_top = bars_top + row * (kBarHeight + kBarGap);
    svg += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" stroke=\"white\" "
        "stroke-width=\"0.4\"><title>{}</title></rect>\n",
        from, row_top, width, kBarHeight, bar.color, xml_text(bar.title));
    // A name is drawn if it fits; the pointer reaches the bar through it.
    if (width > 14 + kLetterWidth * static_cast<double>(bar.name.size()))
      svg += fmt::format(
          "<text x=\"{:.2f}\" y=\"{:.1f}\" font-size=\"11\" fill=\"white\" "
          "pointer-events=\"none\">{}</text>\n",
          from + 5, row_top + kBarHeight - 4, xml_text(bar.name));
  }
  return {svg + "</svg>\n", height};
}

}  // namespace remat
