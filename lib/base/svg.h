#pragma once
// An SVG picture, drawn element by element. Coordinates are pixels.

#include <fmt/format.h>

#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "lib/base/valid_text.h"

namespace remat {

/// The elements of a picture. `style` is attributes of an element; words and titles are escaped.
class Svg {
 public:
  /// Begins a picture with a white ground. `top`: its place in a picture around it.
  Svg(double width, double height, std::string_view style, double top = 0)
      : text_(fmt::format("<svg xmlns=\"http://www.w3.org/2000/svg\" y=\"{0}\" "
                          "viewBox=\"0 0 {1} {2}\" width=\"{1}\" height=\"{2}\" {3}>\n"
                          "<rect width=\"{1}\" height=\"{2}\" fill=\"white\"/>\n",
                          top, width, height, style)) {}

  void line(double x1, double y1, double x2, double y2, std::string_view style) {
    add("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2, y2,
        style);
  }
  void text(double x, double y, std::string_view words, std::string_view style = {}) {
    add("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, style, xml_text(words));
  }
  /// Draws a rectangle whose title browsers show under the pointer.
  void rect(double x, double y, double width, double height, std::string_view style,
            std::string_view title = {}) {
    add("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" {}>{}</rect>\n", x, y,
        width, height, style,
        title.empty() ? "" : fmt::format("<title>{}</title>", xml_text(title)));
  }
  template <class... Args>
  void add(fmt::format_string<Args...> element, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), element, std::forward<Args>(args)...);
  }
  std::string done() const { return text_ + "</svg>\n"; }

 private:
  std::string text_;
};

}  // namespace remat
