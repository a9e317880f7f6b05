// Recorder::write_memory_svg and write_html: the picture alone, and in a page with the table.

#include <fmt/format.h>

#include "lib/base/valid_text.h"
#include "lib/observe/report_text.h"

namespace remat {

void Recorder::write_memory_svg(const std::filesystem::path& path) const {
  const std::vector<Timeline> timelines = timelines_of(*recording_);
  const double last_ms = last_ms_of(timelines);
  std::string svg;
  double height = 0;
  for (const Timeline& each : timelines) {
    const Drawing drawing = memory_picture(each, last_ms, height);
    svg += drawing.svg;
    height += drawing.height;
  }
  if (timelines.size() > 1)
    svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\">\n{2}</svg>\n",
        drawing_width, height, svg);
  write_report_file(path, svg);
}

std::string Recorder::to_html() const {
  const Report report = this->report();
  std::string page =
      "<!DOCTYPE html>\n"
      "<html lang=\"en\">\n"
      "<head>\n"
      "<meta charset=\"utf-8\">\n"
      "<title>remat: one run</title>\n"
      "<style>\n"
      "body "
      "{ font-family: Helvetica, Arial, sans-serif; color: #333; margin: 2em; max-width: 1120px }\n"
      "table { border-collapse: collapse; font-size: 14px; margin-bottom: 1.5em }\n"
      "th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #ddd }\n"
      "th:first-child, td:first-child { text-align: left }\n"
      "svg { max-width: 100%; height: auto }\n"
      "</style>\n"
      "</head>\n"
      "<body>\n";
  page += report.regions.empty() && !report.evictions.empty()
              ? "<h1>One run under a byte budget</h1>\n"
              : "<h1>Regions of one run</h1>\n";
  const std::vector<Timeline> timelines = timelines_of(*recording_);
  const double last_ms = last_ms_of(timelines);
  for (const Timeline& each : timelines) page += memory_picture(each, last_ms).svg;
  page +=
      "<p>Values appear where the pointer rests. Bytes are sums over all calls; times include the "
      "regions inside.</p>\n";
  const auto add = [&](const std::vector<std::string>& row, const char* cell) {
    page += "<tr>";
    for (const std::string& text : row) page += fmt::format("<{0}>{1}</{0}>", cell, xml_text(text));
    page += "</tr>\n";
  };
  for (const ReportTable& table : tables_of(report)) {
    if (!table.title.empty()) page += fmt::format("<h2>{}</h2>\n", xml_text(table.title));
    page += "<table>\n";
    add(table.head, "th");
    for (const auto& row : table.rows) add(row, "td");
    page += "</table>\n";
  }
  for (const std::string& note : notes_of(report))
    page += fmt::format("<p>{}</p>\n", xml_text(note));
  if (report.dropped_events > 0)
    page += fmt::format(
        "<p>The oldest {} events are gone: RecorderOptions::max_events was reached. The "
        "table counts them, the picture does not show them.</p>\n",
        report.dropped_events);
  return page + "</body>\n</html>\n";
}

void Recorder::write_html(const std::filesystem::path& path) const {
  write_report_file(path, to_html());
}

}  // namespace remat
