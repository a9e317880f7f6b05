#pragma once
// Memory over time as a picture: one curve per training, a line where backward starts.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../picture.h"
#include "timeline.h"

struct Curve {
  std::string name;
  std::string color;
  std::vector<Sample> samples;
};

// Returns a step curve: memory is constant between two samples. Within one pixel's width, only the
// last, the lowest and the highest sample are visible.
inline std::string points_of(const Curve& curve, const Picture& picture) {
  std::string points;
  double level = picture.y(0);
  for (auto sample = curve.samples.begin(); sample != curve.samples.end();) {
    const double column = std::floor(picture.x(sample->ms));
    double low = level, high = level;
    points += Picture::format("%g,%.1f ", column, level);
    for (; sample != curve.samples.end() && std::floor(picture.x(sample->ms)) == column; ++sample) {
      level = picture.y(megabytes(sample->bytes));
      low = std::max(low, level);
      high = std::min(high, level);
    }
    if (low == high) continue;
    for (const double each : {high, low, level})
      points += Picture::format("%g,%.1f ", column, each);
  }
  return points;
}

// Draws the curves, and `limit_bytes` as a horizontal line.
inline Picture memory_picture(const std::string& title, const std::vector<Curve>& curves,
                              int64_t limit_bytes) {
  Axis time{.label = "time from the start of backward [ms]"};
  Axis memory{.label = "activation memory [MB]", .most_marks = 6};
  std::vector<double> peaks;
  for (const Curve& curve : curves) {
    double& peak = peaks.emplace_back(0);
    for (const Sample& sample : curve.samples) {
      time.low = std::min(time.low, sample.ms);
      time.high = std::max(time.high, sample.ms);
      peak = std::max(peak, megabytes(sample.bytes));
    }
    memory.high = std::max(memory.high, 1.05 * peak);
  }

  Picture picture(title, time, memory);
  for (size_t i = 0; i < curves.size(); ++i) {
    const auto& [name, color, samples] = curves[i];
    const std::string points = points_of(curves[i], picture);
    const double floor = Picture::kBottom;
    picture.add("<polygon fill=\"" + color + "\" fill-opacity=\"0.15\" points=\"" +
                Picture::format("%.1f,%.1f ", picture.x(samples.front().ms), floor) + points +
                Picture::format("%.1f,%.1f", picture.x(samples.back().ms), floor) + "\"/>\n");
    picture.add("<polyline fill=\"none\" stroke-width=\"1.6\" stroke-linejoin=\"round\" stroke=\"" +
                color + "\" points=\"" + points + "\"/>\n");
    // The legend, three to a row.
    const double left = Picture::kLeft + 285.0 * static_cast<double>(i % 3);
    const double top = 42 + 20.0 * static_cast<double>(i / 3);
    picture.add(Picture::format("<rect x=\"%g\" y=\"%g\" width=\"22\" height=\"12\" ", left, top) +
                "fill-opacity=\"0.3\" fill=\"" + color + "\" stroke=\"" + color + "\"/>\n");
    picture.text(left + 29, top + 11, name + Picture::format(", peak %.1f MB", peaks[i]));
  }

  const double backward = picture.x(0), limit = picture.y(megabytes(limit_bytes));
  const std::string style = "fill=\"#666\" font-style=\"italic\"";
  picture.line(backward, Picture::kTop - 22, backward, Picture::kBottom,
               "stroke=\"#666\" stroke-dasharray=\"5 4\"");
  picture.text(backward - 8, Picture::kTop - 10, "forward", style + " text-anchor=\"end\"");
  picture.text(backward + 8, Picture::kTop - 10, "backward", style);
  picture.line(Picture::kLeft, limit, Picture::kRight, limit,
               "stroke=\"#b00\" stroke-dasharray=\"2 4\"");
  picture.text(Picture::kRight, limit - 6,
               Picture::format("memory limit set afterwards: %.1f MB", megabytes(limit_bytes)),
               "text-anchor=\"end\" fill=\"#b00\"");
  return picture;
}
