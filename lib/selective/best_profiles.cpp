#include "lib/selective/best_profiles.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <utility>

namespace remat {

namespace {

constexpr const char* profile_heading = "remat profiles 1";

/// One way of a region, as it stands in the file.
struct Profile {
  std::string with, region;
  std::vector<std::string> lines;
  std::size_t first_line = 0;  ///< its number
};

[[noreturn]] void refuse_profile(const std::filesystem::path& file, std::size_t line,
                                 const char* what) {
  TORCH_CHECK_VALUE(
      false, "remat::save_best: line ", line, " of \"", file.string(), "\" ", what,
      ".\nDo: name a file that save_best has written, or remove it: what is needed is "
      "measured anew.");
}

std::string measured_here_with() {
  return fmt::format("LibTorch {}, {} threads", TORCH_VERSION, at::get_num_threads());
}

/// In one line.
std::string escaped(const std::string& name) {
  std::string text;
  for (const char each : name)
    if (each == '\n')
      text += "\\n";
    else if (each == '\\')
      text += "\\\\";
    else
      text += each;
  return text;
}

std::string unescaped(const std::string& text) {
  std::string name;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_escaped = text[i] == '\\' && i + 1 < text.size();
    if (is_escaped) ++i;
    name += is_escaped && text[i] == 'n' ? '\n' : text[i];
  }
  return name;
}

/// The words of a line, of which the first is `word`, into numbers; false if there are others.
template <class... T>
bool read_words(std::istringstream& in, const char* word, T&... numbers) {
  std::string first;
  return (in >> first) && first == word && static_cast<bool>((in >> ... >> numbers));
}

bool is_at_end(std::istringstream& in) {
  std::string rest;
  return !(in >> rest);
}

std::vector<Profile> read_file(const std::filesystem::path& file) {
  std::vector<Profile> all;
  std::ifstream in(file);
  if (!in.is_open()) return all;
  std::size_t number = 0;
  std::string line;
  const auto next = [&] {
    ++number;
    return static_cast<bool>(std::getline(in, line));
  };
  if (!next() || line != profile_heading)
    refuse_profile(file, number, "does not begin a file of profiles");
  while (next()) {
    Profile profile;
    profile.with = line;
    if (!next() || !line.starts_with("region")) refuse_profile(file, number, "names no region");
    profile.region = line.size() > 7 ? unescaped(line.substr(7)) : "";
    if (!next()) refuse_profile(file, number, "is missing");
    std::istringstream words(line);
    std::size_t num_values = 0, num_calls = 0;
    if (!read_words(words, "way", num_values, num_calls) || !is_at_end(words))
      refuse_profile(file, number, "is no line of profiles");
    profile.lines.push_back(line);
    profile.first_line = number;
    for (std::size_t i = 0; i < num_values + num_calls; ++i) {
      if (!next()) refuse_profile(file, number, "is missing");
      profile.lines.push_back(line);
    }
    all.push_back(std::move(profile));
  }
  return all;
}

/// As `toString` of its name has it.
std::optional<c10::OperatorHandle> operator_of(const std::string& name) {
  const std::size_t space = name.find("::"), dot = name.find('.', space + 2);
  if (space == std::string::npos) return std::nullopt;
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema(
      {name.substr(0, dot), overload == "default" ? "" : overload});
}

/// None: it has an operator that is not there.
std::optional<MeasuredCalls> calls_of(const std::filesystem::path& file, const Profile& profile) {
  MeasuredCalls measured;
  std::size_t num_values = 0, num_calls = 0, number = profile.first_line;
  std::istringstream first(profile.lines.front());
  read_words(first, "way", num_values, num_calls);
  for (std::size_t i = 1; i < profile.lines.size(); ++i) {
    ++number;
    std::istringstream in(profile.lines[i]);
    if (i <= num_values) {
      CallGraph::Value value;
      if (!read_words(in, "value", value.bytes, value.is_held) || value.bytes < 0 || !is_at_end(in))
        refuse_profile(file, number, "is no value of a profile");
      measured.graph.values.push_back(value);
      continue;
    }
    std::string name;
    uint64_t look = 0;
    int64_t bytes = 0;
    double seconds = 0;
    CallGraph::Call call;
    bool is_read = read_words(in, "call", name, look, bytes, seconds, call.seconds,
                              call.can_be_kept, call.is_kept_anyway);
    for (std::vector<uint32_t>* const each : {&call.reads, &call.makes}) {
      std::size_t count = 0;
      is_read = is_read && static_cast<bool>(in >> count) && count <= num_values;
      for (std::size_t j = 0; is_read && j < count; ++j) {
        uint32_t value = 0;
        is_read = static_cast<bool>(in >> value) && value < num_values;
        each->push_back(value);
      }
    }
    if (!is_read || !is_at_end(in) || bytes < 0 || !(seconds >= 0) || !(call.seconds >= 0))
      refuse_profile(file, number, "is no call of a profile");
    const auto op = operator_of(name);
    if (!op) return std::nullopt;
    measured.calls.push_back({&traits_of(*op), look, bytes, seconds});
    measured.graph.calls.push_back(std::move(call));
  }
  return measured;
}

Profile profile_of(const std::string& region, const MeasuredCalls& measured) {
  Profile profile{measured_here_with(), region, {}};
  const CallGraph& graph = measured.graph;
  profile.lines.push_back(fmt::format("way {} {}", graph.values.size(), graph.calls.size()));
  for (const CallGraph::Value& value : graph.values)
    profile.lines.push_back(fmt::format("value {} {:d}", value.bytes, value.is_held));
  for (std::size_t i = 0; i < graph.calls.size(); ++i) {
    const MeasuredCalls::Call& call = measured.calls[i];
    const CallGraph::Call& node = graph.calls[i];
    std::string line =
        fmt::format("call {} {} {} {} {} {:d} {:d}", call.op->name, call.arguments, call.bytes,
                    call.seconds, node.seconds, node.can_be_kept, node.is_kept_anyway);
    for (const std::vector<uint32_t>* const each : {&node.reads, &node.makes}) {
      line += fmt::format(" {}", each->size());
      for (const uint32_t value : *each) line += fmt::format(" {}", value);
    }
    profile.lines.push_back(std::move(line));
  }
  return profile;
}

}  // namespace

std::map<std::string, std::vector<MeasuredCalls>> read_profiles(const std::filesystem::path& file) {
  std::map<std::string, std::vector<MeasuredCalls>> found;
  const std::string with = measured_here_with();
  for (const Profile& profile : read_file(file)) {
    auto calls = calls_of(file, profile);  // looked at in any case: a file is right as a whole
    if (calls && profile.with == with) found[profile.region].push_back(std::move(*calls));
  }
  return found;
}

void write_profile(const std::filesystem::path& file, const std::string& region,
                   const ChosenWays& ways) {
  static std::mutex mutex;  // policies of this process may share a file
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Profile> all = read_file(file);
  std::erase_if(all, [&, with = measured_here_with()](const Profile& each) {
    return each.with == with && each.region == region;
  });
  for (const auto& way : ways) all.push_back(profile_of(region, way->measured));
  const std::string beside = fmt::format("{}.{}", file.string(), ::getpid());
  std::ofstream out(beside);
  out << profile_heading << "\n";
  for (const Profile& profile : all) {
    out << profile.with << "\nregion " << escaped(profile.region) << "\n";
    for (const std::string& line : profile.lines) out << line << "\n";
  }
  out.close();
  const bool is_written = out && std::rename(beside.c_str(), file.c_str()) == 0;
  if (!is_written) std::remove(beside.c_str());
  TORCH_CHECK_VALUE(
      is_written, "remat::save_best: profiles could not be written to \"", file.string(),
      "\".\nDo: name a file in a directory that exists and that this user may write to.");
}

}  // namespace remat
