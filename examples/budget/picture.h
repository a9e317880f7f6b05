#pragma once
// Step time over peak memory as an SVG picture: the frontier as a curve, plans that ran as points.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// A plan that was run; or a corner of the frontier, where `name` is empty.
struct PlanPoint {
  std::string name;
  double megabytes = 0;
  double time = 0;  // of a step, as a ratio to the step without regions
  bool is_chosen = false;
};

class FrontierPicture {
 public:
  FrontierPicture(std::string title, std::vector<PlanPoint> frontier, std::vector<PlanPoint> runs,
                  double budget_mb)
      : title_(std::move(title)),
        frontier_(std::move(frontier)),
        runs_(std::move(runs)),
        budget_mb_(budget_mb) {
    for (const PlanPoint& point : runs_) {
      last_mb_ = std::max(last_mb_, point.megabytes);
      top_ = std::max(top_, point.time);
    }
    // The steepest part of the frontier, plans of many levels, leaves the picture at the top.
    top_ = std::max(top_, 1.5) + 0.15;
    last_mb_ *= 1.06;
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
    svg += format(
        "<clipPath id=\"plot\"><rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\"/></clipPath>\n",
        kLeft, kTop, kRight - kLeft, kBottom - kTop);
    svg += text(kLeft, 32, title_, "font-size=\"17\" font-weight=\"bold\"");
    svg += axes() + curve() + budget_line() + marks() + legend();
    return svg + "</svg>\n";
  }

 private:
  static constexpr double kWidth = 960, kHeight = 560;
  static constexpr double kLeft = 80, kRight = 930, kTop = 90, kBottom = 490;
  static constexpr double kFirst = 0.9;  // time at the bottom

  double x(double megabytes) const { return kLeft + megabytes / last_mb_ * (kRight - kLeft); }
  double y(double time) const {
    return kBottom - (time - kFirst) / (top_ - kFirst) * (kBottom - kTop);
  }

  std::string axes() const {
    std::string svg;
    const double time_step = round_step((top_ - kFirst) / 9);
    for (double time = 1; time <= top_; time += time_step) {
      svg += line(kLeft, y(time), kRight, y(time), "stroke=\"#e4e4e4\"");
      svg += text(kLeft - 8, y(time) + 4, format("%g", time), "text-anchor=\"end\"");
    }
    const double step = round_step(last_mb_ / 9);
    for (double mb = 0; mb <= last_mb_; mb += step) {
      svg += line(x(mb), kBottom, x(mb), kBottom + 5, "stroke=\"#333\"");
      svg += text(x(mb), kBottom + 20, format("%g", mb), "text-anchor=\"middle\"");
    }
    svg += line(kLeft, kBottom, kRight, kBottom, "stroke=\"#333\"");
    svg += line(kLeft, kTop, kLeft, kBottom, "stroke=\"#333\"");
    svg += text((kLeft + kRight) / 2, kBottom + 45, "peak activation memory [MB]",
                "text-anchor=\"middle\"");
    svg += text(0, 0, "time of a step, of the step without regions",
                format("text-anchor=\"middle\" transform=\"translate(26 %g) rotate(-90)\"",
                       (kTop + kBottom) / 2));
    return svg;
  }

  // A staircase: with a budget between two corners the plan is that of the smaller one.
  std::string curve() const {
    std::string points;
    for (std::size_t i = 0; i < frontier_.size(); ++i) {
      const PlanPoint& point = frontier_[i];
      if (i > 0) points += format("%.1f,%.1f ", x(point.megabytes), y(frontier_[i - 1].time));
      points += format("%.1f,%.1f ", x(point.megabytes), y(point.time));
    }
    points += format("%.1f,%.1f", kRight, y(frontier_.back().time));
    std::string beyond;
    if (const PlanPoint& first = frontier_.front(); first.time > top_)
      beyond =
          text(x(first.megabytes) + 8, kTop + 10,
               format("up to %.1f at %.2f MB", first.time, first.megabytes), "fill=\"#4c72b0\"");
    return beyond +
           "<polyline clip-path=\"url(#plot)\" fill=\"none\" stroke=\"#4c72b0\" stroke-width=\"2\" "
           "stroke-linejoin=\"round\" points=\"" +
           points + "\"/>\n";
  }

  std::string budget_line() const {
    return line(x(budget_mb_), kTop - 8, x(budget_mb_), kBottom,
                "stroke=\"#b00\" stroke-dasharray=\"5 4\"") +
           text(x(budget_mb_) + 6, kTop + 30, format("budget %.1f MB", budget_mb_),
                "fill=\"#b00\"");
  }

  // Names go where no name is yet: above the mark (the curve is below), else right of it or higher.
  std::string marks() const {
    struct Box {
      double left, top, right, bottom;
    };
    std::vector<Box> taken;
    for (const PlanPoint& point : runs_)
      taken.push_back(
          {x(point.megabytes) - 7, y(point.time) - 7, x(point.megabytes) + 7, y(point.time) + 7});
    std::string svg;
    for (const PlanPoint& point : runs_) {
      const double cx = x(point.megabytes), cy = y(point.time);
      const std::string color = point.is_chosen ? "#b00" : "#dd8452";
      svg += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"5.5\" fill=\"", cx, cy) + color +
             "\" stroke=\"white\"/>\n";
      const double width = 7.0 * static_cast<double>(point.name.size());
      for (const double dy : {-11.0, 4.0, -29.0, -47.0, 22.0, -65.0, 40.0}) {
        const double left = std::min(cx + 9, kRight - width);
        const Box box{left, cy + dy - 12, left + width, cy + dy + 3};
        const bool is_free = std::none_of(taken.begin(), taken.end(), [&](const Box& other) {
          return box.left < other.right && other.left < box.right && box.top < other.bottom &&
                 other.top < box.bottom;
        });
        if (!is_free) continue;
        taken.push_back(box);
        svg += text(left, cy + dy, point.name, "");
        break;
      }
    }
    return svg;
  }

  std::string legend() const {
    const double top = 60;
    const auto dot = [&](double left, const char* color) {
      return format("<circle cx=\"%g\" cy=\"%g\" r=\"5.5\" ", left, top - 4) + "fill=\"" + color +
             "\"/>\n";
    };
    return line(kLeft, top - 4, kLeft + 28, top - 4, "stroke=\"#4c72b0\" stroke-width=\"2\"") +
           text(kLeft + 36, top, "best plan for each budget, predicted", "") +
           dot(kLeft + 320, "#dd8452") + text(kLeft + 332, top, "plans that ran, measured", "") +
           dot(kLeft + 540, "#b00") +
           text(kLeft + 552, top, "the plan for the budget, measured", "");
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
  std::vector<PlanPoint> frontier_, runs_;
  double budget_mb_;
  double last_mb_ = 0, top_ = 0;
};
