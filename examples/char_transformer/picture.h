#pragma once
// Memory over time as an SVG picture: one curve per training, a line where backward starts.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "timeline.h"

struct Curve {
  std::string name;
  std::string color;
  std::vector<Sample> samples;
};

class Picture {
 public:
  // `limit_bytes` is drawn as a horizontal line.
  Picture(std::string title, std::vector<Curve> curves, int64_t limit_bytes)
      : title_(std::move(title)), curves_(std::move(curves)), limit_mb_(megabytes(limit_bytes)) {
    for (const Curve& curve : curves_) {
      for (const Sample& sample : curve.samples) {
        first_ms_ = std::min(first_ms_, sample.ms);
        last_ms_ = std::max(last_ms_, sample.ms);
        top_mb_ = std::max(top_mb_, megabytes(sample.bytes));
      }
    }
    top_mb_ *= 1.05;
  }

  void write(const std::string& path) const {
    std::ofstream file(path);
    file << to_string();
    if (!file.flush()) throw std::runtime_error("cannot write '" + path + "'");
  }

  std::string to_string() const {
    std::string svg = format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" height=\"%g\" "
        "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" fill=\"#333\">\n",
        kWidth, kHeight, kWidth, kHeight);
    svg += format("<rect width=\"%g\" height=\"%g\" fill=\"white\"/>\n", kWidth, kHeight);
    svg += text(kLeft, 30, title_, "font-size=\"17\" font-weight=\"bold\"");
    svg += axes() + curves() + backward_line() + limit_line() + legend();
    return svg + "</svg>\n";
  }

 private:
  static constexpr double kWidth = 960, kHeight = 520;
  static constexpr double kLeft = 80, kRight = 930, kTop = 110, kBottom = 455;

  static double megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

  double x(double ms) const {
    return kLeft + (ms - first_ms_) / (last_ms_ - first_ms_) * (kRight - kLeft);
  }
  double y(double mb) const { return kBottom - mb / top_mb_ * (kBottom - kTop); }

  std::string axes() const {
    std::string svg;
    const double mb_step = round_step(top_mb_ / 6);
    for (double mb = 0; mb <= top_mb_; mb += mb_step) {
      svg += line(kLeft, y(mb), kRight, y(mb), "stroke=\"#e4e4e4\"");
      svg += text(kLeft - 8, y(mb) + 4, format("%g", mb), "text-anchor=\"end\"");
    }
    const double ms_step = round_step((last_ms_ - first_ms_) / 9);
    for (double ms = std::ceil(first_ms_ / ms_step) * ms_step; ms <= last_ms_; ms += ms_step) {
      svg += line(x(ms), kBottom, x(ms), kBottom + 5, "stroke=\"#333\"");
      // + 0.0: zero without a sign
      svg += text(x(ms), kBottom + 20, format("%g", ms + 0.0), "text-anchor=\"middle\"");
    }
    svg += line(kLeft, kBottom, kRight, kBottom, "stroke=\"#333\"");
    svg += line(kLeft, kTop, kLeft, kBottom, "stroke=\"#333\"");
    svg += text((kLeft + kRight) / 2, kBottom + 45, "time from the start of backward [ms]",
                "text-anchor=\"middle\"");
    svg += text(0, 0, "activation memory [MB]",
                format("text-anchor=\"middle\" transform=\"translate(24 %g) rotate(-90)\"",
                       (kTop + kBottom) / 2));
    return svg;
  }

  std::string curves() const {
    std::string svg;
    for (const Curve& curve : curves_) {
      std::string points;
      for (const auto& [px, py] : pixels(curve)) points += format("%g,%.1f ", px, py);
      svg += "<polygon fill=\"" + curve.color + "\" fill-opacity=\"0.15\" points=\"" +
             format("%.1f,%.1f ", x(curve.samples.front().ms), y(0)) + points +
             format("%.1f,%.1f", x(curve.samples.back().ms), y(0)) + "\"/>\n";
      svg += "<polyline fill=\"none\" stroke-width=\"1.6\" stroke-linejoin=\"round\" stroke=\"" +
             curve.color + "\" points=\"" + points + "\"/>\n";
    }
    return svg;
  }

  // Between two samples memory stays as it was. Of the samples within one pixel's width only the
  // last, the lowest and the highest can be seen.
  std::vector<std::pair<double, double>> pixels(const Curve& curve) const {
    std::vector<std::pair<double, double>> points;
    double column = -1, level = y(0), low = level, high = level;
    const auto add = [&](double at, double to) {
      if (points.empty() || points.back() != std::pair(at, to)) points.emplace_back(at, to);
    };
    const auto finish_column = [&] {
      if (column < 0) return;
      for (const double each : {high, low, level}) add(column, each);
    };
    for (const Sample& sample : curve.samples) {
      const double sample_column = std::floor(x(sample.ms));
      if (sample_column != column) {
        finish_column();
        column = sample_column;
        add(column, level);
        low = high = level;
      }
      level = y(megabytes(sample.bytes));
      low = std::max(low, level);
      high = std::min(high, level);
    }
    finish_column();
    return points;
  }

  std::string backward_line() const {
    const std::string style = "fill=\"#666\" font-style=\"italic\"";
    return line(x(0), kTop - 22, x(0), kBottom, "stroke=\"#666\" stroke-dasharray=\"5 4\"") +
           text(x(0) - 8, kTop - 10, "forward", style + " text-anchor=\"end\"") +
           text(x(0) + 8, kTop - 10, "backward", style);
  }

  std::string limit_line() const {
    return line(kLeft, y(limit_mb_), kRight, y(limit_mb_),
                "stroke=\"#b00\" stroke-dasharray=\"2 4\"") +
           text(kRight, y(limit_mb_) - 6, format("memory limit set afterwards: %.1f MB", limit_mb_),
                "text-anchor=\"end\" fill=\"#b00\"");
  }

  // Three to a row.
  std::string legend() const {
    std::string svg;
    for (size_t i = 0; i < curves_.size(); ++i) {
      const Curve& curve = curves_[i];
      const double left = kLeft + 285.0 * static_cast<double>(i % 3);
      const double top = 42 + 20.0 * static_cast<double>(i / 3);
      const auto peak =
          std::max_element(curve.samples.begin(), curve.samples.end(),
                           [](const Sample& a, const Sample& b) { return a.bytes < b.bytes; });
      svg += format("<rect x=\"%g\" y=\"%g\" width=\"22\" height=\"12\" fill-opacity=\"0.3\" ",
                    left, top) +
             "fill=\"" + curve.color + "\" stroke=\"" + curve.color + "\"/>\n";
      svg += text(left + 29, top + 11,
                  curve.name + format(", peak %.1f MB", megabytes(peak->bytes)), "");
    }
    return svg;
  }

  // 1, 2 or 5 times a power of ten.
  static double round_step(double step) {
    const double power = std::pow(10, std::floor(std::log10(step)));
    for (const double factor : {1, 2, 5}) {
      if (step <= factor * power) return factor * power;
    }
    return 10 * power;
  }

  static std::string line(double x1, double y1, double x2, double y2, const std::string& style) {
    return format("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" ", x1, y1, x2, y2) +
           style + "/>\n";
  }
  static std::string text(double x, double y, const std::string& words, const std::string& style) {
    return format("<text x=\"%.1f\" y=\"%.1f\" ", x, y) + style + ">" + words + "</text>\n";
  }
  template <class... Args>
  static std::string format(const char* pattern, Args... args) {
    char buffer[512];
    std::snprintf(buffer, sizeof(buffer), pattern, args...);
    return buffer;
  }

  std::string title_;
  std::vector<Curve> curves_;
  double limit_mb_;
  double first_ms_ = 0, last_ms_ = 1, top_mb_ = 1;
};
