#pragma once
// An SVG picture with two axes. Drawing is in pixels; `x` and `y` return the places of values.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

inline double megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

struct Axis {
  std::string label;
  double low = 0, high = 1;
  int most_marks = 9;
};

class Picture {
 public:
  static constexpr double kLeft = 80, kRight = 930, kTop = 105, kBottom = 480;

  Picture(const std::string& title, Axis across, Axis up)
      : across_(std::move(across)), up_(std::move(up)) {
    svg_ =
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 545\" width=\"960\" "
        "height=\"545\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" "
        "fill=\"#333\">\n<rect width=\"960\" height=\"545\" fill=\"white\"/>\n";
    text(kLeft, 30, title, "font-size=\"17\" font-weight=\"bold\"");
    for (const double value : marks(up_)) {
      line(kLeft, y(value), kRight, y(value), "stroke=\"#e4e4e4\"");
      text(kLeft - 8, y(value) + 4, format("%g", value), "text-anchor=\"end\"");
    }
    for (const double value : marks(across_)) {
      line(x(value), kBottom, x(value), kBottom + 5, "stroke=\"#333\"");
      text(x(value), kBottom + 20, format("%g", value), "text-anchor=\"middle\"");
    }
    line(kLeft, kBottom, kRight, kBottom, "stroke=\"#333\"");
    line(kLeft, kTop, kLeft, kBottom, "stroke=\"#333\"");
    text((kLeft + kRight) / 2, kBottom + 45, across_.label, "text-anchor=\"middle\"");
    text(0, 0, up_.label,
         format("text-anchor=\"middle\" transform=\"translate(24 %g) rotate(-90)\"",
                (kTop + kBottom) / 2));
  }

  double x(double value) const {
    return kLeft + (value - across_.low) / (across_.high - across_.low) * (kRight - kLeft);
  }
  double y(double value) const {
    return kBottom - (value - up_.low) / (up_.high - up_.low) * (kBottom - kTop);
  }

  void line(double x1, double y1, double x2, double y2, const std::string& style) {
    add(format("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" ", x1, y1, x2, y2) + style +
        "/>\n");
  }
  void text(double x, double y, const std::string& words, const std::string& style = {}) {
    add(format("<text x=\"%.1f\" y=\"%.1f\" ", x, y) + style + ">" + words + "</text>\n");
  }
  void add(const std::string& element) { svg_ += element; }

  void write(const std::string& path) const {
    std::ofstream file(path);
    file << svg_ << "</svg>\n";
    if (!file.flush()) throw std::runtime_error("cannot write '" + path + "'");
  }

  template <class... Args>
  static std::string format(const char* pattern, Args... args) {
    char buffer[512];
    std::snprintf(buffer, sizeof(buffer), pattern, args...);
    return buffer;
  }

 private:
  // Returns multiples of 1, 2 or 5 times a power of ten.
  static std::vector<double> marks(const Axis& axis) {
    const double least = (axis.high - axis.low) / axis.most_marks;
    const double power = std::pow(10, std::floor(std::log10(least)));
    double step = 10 * power;
    for (const double factor : {5, 2, 1})
      if (factor * power >= least) step = factor * power;
    std::vector<double> values;
    for (double i = std::ceil(axis.low / step); i * step <= axis.high; ++i)
      values.push_back(i * step + 0.0);  // + 0.0: zero without a sign
    return values;
  }

  Axis across_, up_;
  std::string svg_;
};
