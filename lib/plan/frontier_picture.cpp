#include "lib/plan/frontier_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace remat {

namespace {

constexpr double width = 640, height = 400, left = 70, right = 20, top = 40, bottom = 50;

/// Returns a step of 1, 2 or 5 times a power of ten that cuts a range into 4 to 10 parts.
double nice_step(double range) {
  const double power = std::pow(10, std::floor(std::log10(range / 4)));
  for (const double each : {5.0, 2.0})
    if (each * power * 4 <= range) return each * power;
  return power;
}

struct Axis {
  double from, to, at_from, at_to;
  double at(double value) const {
    return at_from + (value - from) / (to - from) * (at_to - at_from);
  }
};

}  // namespace

std::string frontier_picture(const Frontier& frontier, double step_s, int64_t budget_bytes,
                             const Simulation& chosen) {
  const auto& points = frontier.points();
  const auto megabytes = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  const auto time = [&](double extra_s) { return step_s > 0 ? 1 + extra_s / step_s : 1.0; };
  const double most_mb =
      std::max({megabytes(points.back().bytes), megabytes(chosen.peak_bytes), 1e-6});
  // Deeply nested plans may take many times as long: their points leave the picture at the top.
  const double most_time = std::min(std::max(time(points.front().extra_s), 1.1), 4.0);
  const Axis x{0, 1.06 * most_mb, left, width - right};
  const Axis y{1, 1 + 1.1 * (most_time - 1), height - bottom, top};
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
      width, height);
  const auto out = std::back_inserter(svg);
  const auto line = [&](double x1, double y1, double x2, double y2, const char* style) {
    fmt::format_to(out, "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1,
                   y1, x2, y2, style);
  };
  const auto text = [&](double at_x, double at_y, const char* anchor, const std::string& words) {
    fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", at_x,
                   at_y, anchor, words);
  };
  const double step_x = nice_step(x.to), step_y = nice_step(y.to - 1);
  for (double each = 0; each <= x.to; each += step_x) {
    line(x.at(each), top, x.at(each), height - bottom, "stroke=\"#eee\"");
    text(x.at(each), height - bottom + 18, "middle", fmt::format("{:g}", each));
  }
  for (double each = 1; each <= y.to; each += step_y) {
    line(left, y.at(each), width - right, y.at(each), "stroke=\"#eee\"");
    text(left - 8, y.at(each) + 4, "end", fmt::format("{:g}", each));
  }
  text((left + width - right) / 2, height - 12, "middle",
       "peak of a step beyond input and parameters [MB]");
  text(left - 50, top - 16, "start", "time of a step, over one that recomputes nothing");
  std::string path;
  for (const FrontierPoint& point : points) {
    const double now = std::max(y.at(time(point.extra_s)), top);
    path += path.empty() ? fmt::format("M{:.1f},{:.1f}", x.at(megabytes(point.bytes)), now)
                         : fmt::format(" H{:.1f} V{:.1f}", x.at(megabytes(point.bytes)), now);
  }
  fmt::format_to(out,
                 "<path d=\"{} H{:.1f}\" fill=\"none\" stroke=\"#4c72b0\" stroke-width=\"2\"/>\n",
                 path, width - right);
  if (megabytes(budget_bytes) <= x.to) {
    line(x.at(megabytes(budget_bytes)), top, x.at(megabytes(budget_bytes)), height - bottom,
         "stroke=\"#b00\" stroke-dasharray=\"4 3\"");
    text(x.at(megabytes(budget_bytes)) + 5, top + 12, "start", "budget");
  }
  fmt::format_to(out, "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" fill=\"#b00\"/>\n",
                 x.at(megabytes(chosen.peak_bytes)), std::max(y.at(time(chosen.extra_s)), top));
  return svg + "</svg>\n";
}

}  // namespace remat
