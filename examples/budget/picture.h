#pragma once
// Step time over peak memory as a picture: the frontier as a curve, plans that ran as points.

#include <algorithm>
#include <string>
#include <vector>

#include "../picture.h"

// A plan that was run; or a corner of the frontier, if `name` is empty.
struct PlanPoint {
  std::string name;
  double megabytes = 0;
  double time = 0;  // of a step, as a ratio to the step without regions
  bool is_chosen = false;
};

// Draws a staircase: between two corners, a budget gets the plan of the smaller one. The steepest
// part, plans of many levels, leaves the picture at the top.
inline void draw_curve(Picture& picture, const std::vector<PlanPoint>& frontier, double top) {
  const double height = Picture::kBottom - Picture::kTop;
  std::string points;
  double before = picture.y(frontier.front().time);
  for (const PlanPoint& point : frontier) {
    const double x = picture.x(point.megabytes), y = picture.y(point.time);
    points += Picture::format("%.1f,%.1f %.1f,%.1f ", x, before, x, y);
    before = y;
  }
  points += Picture::format("%.1f,%.1f", Picture::kRight, before);
  picture.add(
      Picture::format("<clipPath id=\"plot\"><rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\"/>",
                      Picture::kLeft, Picture::kTop, Picture::kRight - Picture::kLeft, height) +
      "</clipPath>\n<polyline clip-path=\"url(#plot)\" fill=\"none\" stroke=\"#4c72b0\" "
      "stroke-width=\"2\" stroke-linejoin=\"round\" points=\"" +
      points + "\"/>\n");
  if (const PlanPoint& first = frontier.front(); first.time > top)
    picture.text(picture.x(first.megabytes) + 8, Picture::kTop + 10,
                 Picture::format("up to %.1f at %.2f MB", first.time, first.megabytes),
                 "fill=\"#4c72b0\"");
}

inline void draw_dot(Picture& picture, double x, double y, const std::string& color) {
  picture.add(Picture::format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"5.5\" ", x, y) + "fill=\"" +
              color + "\" stroke=\"white\"/>\n");
}

// Writes names into free places: above the mark (the curve is below), else to the right or higher.
inline void draw_runs(Picture& picture, const std::vector<PlanPoint>& runs) {
  struct Box {
    double left, top, right, bottom;
    bool overlaps(const Box& other) const {
      return left < other.right && other.left < right && top < other.bottom && other.top < bottom;
    }
  };
  std::vector<Box> taken;
  for (const PlanPoint& point : runs) {
    const double x = picture.x(point.megabytes), y = picture.y(point.time);
    taken.push_back({x - 7, y - 7, x + 7, y + 7});
    draw_dot(picture, x, y, point.is_chosen ? "#b00" : "#dd8452");
  }
  for (const PlanPoint& point : runs) {
    const double width = 7.0 * static_cast<double>(point.name.size());
    const double left = std::min(picture.x(point.megabytes) + 9, Picture::kRight - width);
    for (const double dy : {-11.0, 4.0, -29.0, -47.0, 22.0, -65.0, 40.0}) {
      const double y = picture.y(point.time) + dy;
      const Box box{left, y - 12, left + width, y + 3};
      if (std::any_of(taken.begin(), taken.end(), [&](const Box& b) { return box.overlaps(b); }))
        continue;
      taken.push_back(box);
      picture.text(left, y, point.name);
      break;
    }
  }
}

inline Picture frontier_picture(const std::string& title, const std::vector<PlanPoint>& frontier,
                                const std::vector<PlanPoint>& runs, double budget_mb) {
  double last_mb = 0, top = 1.5;
  for (const PlanPoint& point : runs) {
    last_mb = std::max(last_mb, point.megabytes);
    top = std::max(top, point.time);
  }
  top += 0.15;
  Picture picture(title, {"peak activation memory [MB]", 0, 1.06 * last_mb},
                  {"time of a step, of the step without regions", 0.9, top});
  draw_curve(picture, frontier, top);
  const double budget = picture.x(budget_mb), legend = 60;
  picture.line(budget, Picture::kTop - 8, budget, Picture::kBottom,
               "stroke=\"#b00\" stroke-dasharray=\"5 4\"");
  picture.text(budget + 6, Picture::kTop + 30, Picture::format("budget %.1f MB", budget_mb),
               "fill=\"#b00\"");
  draw_runs(picture, runs);
  picture.line(80, legend - 4, 108, legend - 4, "stroke=\"#4c72b0\" stroke-width=\"2\"");
  picture.text(116, legend, "best plan for each budget, predicted");
  draw_dot(picture, 400, legend - 4, "#dd8452");
  picture.text(412, legend, "plans that ran, measured");
  draw_dot(picture, 620, legend - 4, "#b00");
  picture.text(632, legend, "the plan for the budget, measured");
  return picture;
}
