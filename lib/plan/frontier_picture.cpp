#include "lib/plan/frontier_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lib/base/svg.h"

namespace remat {

namespace {

constexpr const char* middle = "text-anchor=\"middle\"";
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
  Svg svg(width, height, "font-family=\"sans-serif\" font-size=\"12\"");
  const double step_x = nice_step(x.to), step_y = nice_step(y.to - 1);
  for (double each = 0; each <= x.to; each += step_x) {
    svg.line(x.at(each), top, x.at(each), height - bottom, "stroke=\"#eee\"");
    svg.text(x.at(each), height - bottom + 18, fmt::format("{:g}", each), middle);
  }
  for (double each = 1; each <= y.to; each += step_y) {
    svg.line(left, y.at(each), width - right, y.at(each), "stroke=\"#eee\"");
    svg.text(left - 8, y.at(each) + 4, fmt::format("{:g}", each), "text-anchor=\"end\"");
  }
  svg.text((left + width - right) / 2, height - 12,
           "peak of a step beyond input and parameters [MB]", middle);
  svg.text(left - 50, top - 16, "time of a step, over one that recomputes nothing");
  std::string path;
  for (const FrontierPoint& point : points) {
    const double at_x = x.at(megabytes(point.bytes)),
                 now = std::max(y.at(time(point.extra_s)), top);
    path +=
        fmt::format(fmt::runtime(path.empty() ? "M{:.1f},{:.1f}" : " H{:.1f} V{:.1f}"), at_x, now);
  }
  svg.add("<path d=\"{} H{:.1f}\" fill=\"none\" stroke=\"#4c72b0\" stroke-width=\"2\"/>\n", path,
          width - right);
  if (const double budget = x.at(megabytes(budget_bytes)); budget <= x.at_to) {
    svg.line(budget, top, budget, height - bottom, "stroke=\"#b00\" stroke-dasharray=\"4 3\"");
    svg.text(budget + 5, top + 12, "budget");
  }
  svg.add("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" fill=\"#b00\"/>\n",
          x.at(megabytes(chosen.peak_bytes)), std::max(y.at(time(chosen.extra_s)), top));
  return svg.done();
}

}  // namespace remat
