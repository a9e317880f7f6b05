// memory_picture(): live bytes over time, and the regions of that time.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>
#include <tuple>

#include "lib/base/svg.h"
#include "lib/observe/report_text.h"

namespace remat {

namespace {

constexpr double kLeft = 90, kRight = 1050, kTop = 70, kBottom = 380;
constexpr double kBarsTop = kBottom + 45, kBarHeight = 15, kBarGap = 3;
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
  std::string_view color;
  std::string name, title;
  int64_t depth;
  int64_t lane;  ///< thread or stream
};

constexpr std::string_view kForward = "#2f6f9f", kRecompute = "#e08a3c", kCopy = "#8c6bb1",
                           kWait = "#b5473c", kAgain = "#b8860b", kDropped = "#6b7280";
constexpr std::string_view kBudgetAtEnd = "text-anchor=\"end\" fill=\"#b00000\"";

double ms_of(int64_t ns) { return static_cast<double>(ns) / 1e6; }

Bar bar_of(const Slice& slice) {
  constexpr std::array<std::string_view, 7> colors{kForward, kRecompute, {},   {},
                                                   kCopy,    kWait,      kCopy};
  const double from = ms_of(slice.begin_ns), to = ms_of(slice.end_ns);
  const std::string what = slice.kind == Slice::Kind::Forward     ? "forward"
                           : slice.kind == Slice::Kind::Recompute ? "recompute"
                                                                  : readable_bytes(slice.bytes);
  std::string title = slice.on || slice.kind <= Slice::Kind::Recompute
                          ? fmt::format("{} {}{}: {:.3f} ms", slice.name, what,
                                        slice.on ? " on " + slice.on->str() : "", to - from)
                          : fmt::format("{}: {} in {:.3f} ms", slice.name, what, to - from);
  if (!slice.on && slice.end != "returned") title += fmt::format(", {}", slice.end);
  return {
      from, to,        colors[static_cast<std::size_t>(slice.kind)], slice.name, std::move(title),
      0,    slice.lane};
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
  for (const DeviceBar& each : timeline.bars) bars.push_back(bar_of(slice_of(each)));
  for (const Event& event : timeline.events)
    if (const auto slice = slice_of(event);
        slice && slice->kind != Slice::Kind::Operator && slice->kind != Slice::Kind::Rerun)
      bars.push_back(bar_of(*slice));
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

/// The places of times and bytes in the picture.
struct Scale {
  double last_ms;
  int64_t peak = 1, top = 1;
  int64_t lasting = 0;        ///< bytes of other tensors that are alive all the time: not drawn
  int64_t highest_limit = 0;  ///< higher ones are not drawn

  Scale(const std::vector<Event>& events, const std::vector<Limit>& limits, double last)
      : last_ms(last) {
    // These bytes would only press the rest flat.
    int64_t least = std::numeric_limits<int64_t>::max(), allocated = 0;
    for (const Event& event : events) {
      if (event.kind == EventKind::Allocation) allocated = std::max(allocated, event.bytes.live);
      if (!has_bytes(event)) continue;
      peak = std::max(peak, event.bytes.live);
      least = std::min(least, stack_of(event.bytes)[kOther]);
    }
    if (least <= peak) lasting = least;
    top = std::max<int64_t>(std::max(peak, allocated) - lasting, 1);
    // A budget far above all live bytes would press the rest flat, too.
    highest_limit = lasting + 2 * (peak - lasting);
    for (const Limit& each : limits)
      if (each.bytes <= highest_limit) top = std::max(top, each.bytes - lasting);
  }
  double x(double ms) const { return kLeft + ms / last_ms * (kRight - kLeft); }
  double x_of_column(std::size_t i) const { return x(static_cast<double>(i) * last_ms / kColumns); }
  double y(double drawn_bytes) const {
    return kBottom - drawn_bytes / (1.05 * static_cast<double>(top)) * (kBottom - kTop);
  }
  double y_of_live(int64_t bytes) const {
    return y(static_cast<double>(std::max<int64_t>(bytes - lasting, 0)));
  }
};

void draw_axes(Svg& svg, const Scale& scale) {
  double legend = kLeft;
  for (const Kind& kind : kKinds) {
    svg.rect(legend, 38, 12, 12, fmt::format("fill=\"{}\"", kind.color));
    svg.text(legend + 17, 48, kind.name);
    legend += 45 + 6.2 * static_cast<double>(std::string_view(kind.name).size());
  }
  const auto top = static_cast<double>(scale.top);
  const double byte_step = nice_step(top), ms_step = nice_step(scale.last_ms);
  for (double bytes = 0; bytes <= top; bytes += byte_step) {
    svg.line(kLeft, scale.y(bytes), kRight, scale.y(bytes), "stroke=\"#e4e4e4\"");
    svg.text(kLeft - 8, scale.y(bytes) + 4, readable_bytes(static_cast<int64_t>(bytes)),
             "text-anchor=\"end\"");
  }
  for (double ms = 0; ms <= scale.last_ms * 1.0001; ms += ms_step)
    svg.text(scale.x(ms), kBottom + 18, fmt::format("{:g} ms", ms), "text-anchor=\"middle\"");
}

/// Returns, for each column, its moment with the most bytes, or the last moment before it.
std::vector<LiveKinds> columns_of(const std::vector<Event>& events, double last_ms) {
  std::vector<LiveKinds> columns(kColumns);
  std::size_t reached = 0;  // the columns below have their moment
  LiveKinds last{};
  for (const Event& event : events) {
    if (!has_bytes(event)) continue;
    const auto column = static_cast<std::size_t>(
        std::min<double>(kColumns - 1, std::floor(ms_of(event.time_ns) / last_ms * kColumns)));
    for (; reached <= column; ++reached) columns[reached] = reached < column ? last : event.bytes;
    last = event.bytes;
    if (last.live >= columns[column].live) columns[column] = last;
  }
  std::fill(columns.begin() + static_cast<std::ptrdiff_t>(reached), columns.end(), last);
  return columns;
}

void draw_stacks(Svg& svg, const std::vector<LiveKinds>& columns, const Scale& scale) {
  std::vector<Stack> stacks;
  for (const LiveKinds& each : columns) stacks.push_back(stack_of(each));
  std::vector<double> floor_of(kColumns, 0);
  for (std::size_t kind = 0; kind < kKinds.size(); ++kind) {
    std::string up, down;
    for (std::size_t i = 0; i < kColumns; ++i) {
      const int64_t bytes = stacks[i][kind];
      const int64_t shown = kind == kOther ? std::max<int64_t>(bytes - scale.lasting, 0) : bytes;
      const double below = floor_of[i], above = below + static_cast<double>(shown);
      floor_of[i] = above;
      const double from = scale.x_of_column(i), to = scale.x_of_column(i + 1);
      up += fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", from, scale.y(above), to, scale.y(above));
      down = fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", to, scale.y(below), from, scale.y(below)) +
             down;
    }
    svg.add("<polygon points=\"{}{}\" fill=\"{}\"/>\n", up, down, kKinds[kind].color);
  }
  for (std::size_t i = 0; i < kColumns; ++i) {
    std::string title =
        fmt::format("{:.3f} ms: {} alive", static_cast<double>(i) * scale.last_ms / kColumns,
                    readable_bytes(columns[i].live));
    for (std::size_t kind = 0; kind < kKinds.size(); ++kind)
      title += fmt::format("\n{}: {}", kKinds[kind].name, readable_bytes(stacks[i][kind]));
    svg.rect(scale.x_of_column(i), kTop, (kRight - kLeft) / kColumns, kBottom - kTop,
             "fill=\"transparent\"", title);
  }
}

void draw_limits(Svg& svg, const std::vector<Limit>& limits, const Scale& scale) {
  const Limit* labeled = nullptr;
  for (const Limit& each : limits) {
    if (each.bytes > scale.highest_limit) continue;
    labeled = &each;
    const double from = scale.x(each.from_ms), level = scale.y_of_live(each.bytes);
    svg.line(from, level, std::max(scale.x(each.to_ms), from + 1), level,
             "stroke=\"#b00000\" stroke-dasharray=\"6 3\"");
  }
  if (labeled != nullptr)
    svg.text(kRight, scale.y_of_live(labeled->bytes) - 5,
             fmt::format("budget: {} alive", readable_bytes(labeled->bytes)), kBudgetAtEnd);
  else if (!limits.empty())
    svg.text(
        kRight, 48,
        fmt::format("budget: {} alive, above the picture", readable_bytes(limits.back().bytes)),
        kBudgetAtEnd);
}

/// Draws the line of the allocator's bytes, in its sizes, from one report to the next. Between
/// reports, and after allocations of threads without reports, the line keeps its last height.
void draw_allocations(Svg& svg, const std::vector<Event>& events, const Scale& scale) {
  std::string points;
  double level = 0, column = -1, low = 0, high = 0;
  for (const Event& event : events) {
    if (event.kind != EventKind::Allocation) continue;
    const double x = scale.x(ms_of(event.time_ns)), y = scale.y_of_live(event.bytes.live);
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
  if (points.empty()) return;
  svg.add("<polyline points=\"{}\" fill=\"none\" stroke=\"#7b2d26\" stroke-width=\"1\"/>\n",
          points);
  svg.text(kRight, kTop - 6, "line: given out by the allocator, in its sizes",
           "text-anchor=\"end\" fill=\"#7b2d26\"");
}

/// A row for each depth of a thread or stream.
using Rows = std::map<std::pair<int64_t, int64_t>, double>;

void draw_bars(Svg& svg, const std::vector<Bar>& bars, const Rows& rows, const Scale& scale) {
  constexpr struct {
    double place;
    std::string_view color, words;
  } legend[] = {{0, kForward, "regions, forward"},       {120, kRecompute, "regions, recompute"},
                {260, kCopy, "copies of offload"},       {390, kWait, "waiting for files"},
                {510, kAgain, "run again for a budget"}, {660, kDropped, "dropped by a budget"}};
  for (const auto& [place, color, words] : legend)
    if (color == kForward || color == kRecompute ||
        std::any_of(bars.begin(), bars.end(), [&](const Bar& bar) { return bar.color == color; }))
      svg.text(kLeft + place, kBarsTop - 6, words, fmt::format("fill=\"{}\"", color));
  for (const Bar& bar : bars) {
    const double from = scale.x(bar.from_ms), width = std::max(scale.x(bar.to_ms) - from, 0.5);
    const double top = kBarsTop + rows.at({bar.lane, bar.depth}) * (kBarHeight + kBarGap);
    svg.rect(from, top, width, kBarHeight,
             fmt::format("fill=\"{}\" stroke=\"white\" stroke-width=\"0.4\"", bar.color),
             bar.title);
    // A name is drawn if it fits; the pointer reaches the bar through it.
    if (width > 14 + kLetterWidth * static_cast<double>(bar.name.size()))
      svg.text(from + 5, top + kBarHeight - 4, bar.name,
               "font-size=\"11\" fill=\"white\" pointer-events=\"none\"");
  }
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

Drawing memory_picture(const Timeline& timeline, double last_ms, double top) {
  const std::vector<Event>& events = timeline.events;
  const std::vector<Limit> limits = limits_of(events, last_ms);
  const std::vector<Bar> bars = bars_of(timeline, last_ms);
  const Scale scale(events, limits, last_ms);
  Rows rows;
  for (const Bar& bar : bars) rows.try_emplace({bar.lane, bar.depth}, 0);
  double num_rows = 0;
  for (auto& [place, row] : rows) row = num_rows++;
  const double height = kBarsTop + num_rows * (kBarHeight + kBarGap) + 20;
  Svg svg(drawing_width, height,
          "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#333\"", top);
  svg.text(
      kLeft, 24,
      fmt::format("Live bytes of {} over time, peak {}",
                  timeline.device.is_cpu() ? "CPU tensors" : "tensors on " + timeline.device.str(),
                  readable_bytes(scale.peak)),
      "font-size=\"16\" font-weight=\"bold\"");
  if (scale.lasting > 0)
    svg.text(kRight, 24,
             fmt::format("not drawn: {} of other tensors, alive all the time",
                         readable_bytes(scale.lasting)),
             "text-anchor=\"end\"");
  draw_axes(svg, scale);
  draw_stacks(svg, columns_of(events, last_ms), scale);
  draw_limits(svg, limits, scale);
  draw_allocations(svg, events, scale);
  draw_bars(svg, bars, rows, scale);
  return {svg.done(), height};
}

}  // namespace remat
