#include "lib/plan/measurements.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

namespace remat {

namespace {

constexpr const char* heading = "remat measurements 5";

using Measurements = std::map<std::string, ChainCost>;

[[noreturn]] void refuse_line(const std::filesystem::path& file, std::size_t line,
                              const char* what) {
  TORCH_CHECK_VALUE(
      false, "remat::fit: line ", line, " of \"", file.string(), "\" ", what,
      ".\nHint: name a file that fit has written, or remove it: what is needed is measured anew.");
}

/// The lines of a file, by number.
class Lines {
 public:
  explicit Lines(const std::filesystem::path& file) : file_(file), in_(file) {}
  bool exists() const { return in_.is_open(); }
  bool next() {
    ++number_;
    if (std::exchange(is_ahead_, false)) return true;
    return static_cast<bool>(std::getline(in_, line_));
  }
  /// Returns whether the next line begins with `word`, without taking the line.
  bool next_begins(std::string_view word) {
    is_ahead_ = is_ahead_ || static_cast<bool>(std::getline(in_, line_));
    return is_ahead_ && line_.starts_with(word);
  }
  const std::string& text() const { return line_; }
  /// Reads the words after `word` of the next line as numbers.
  template <class... T>
  void read(const char* word, T&... numbers) {
    if (!next()) refuse_line(file_, number_, "is missing");
    std::istringstream in(line_);
    std::string first, rest;
    in >> first;
    const bool is_read = first == word && static_cast<bool>((in >> ... >> numbers));
    if (!is_read || (in >> rest)) refuse_line(file_, number_, "is no line of measurements");
  }
  std::size_t number() const { return number_; }

 private:
  const std::filesystem::path& file_;
  std::ifstream in_;
  std::string line_;
  std::size_t number_ = 0;
  bool is_ahead_ = false;  // the next line was read already
};

Measurements read_all(const std::filesystem::path& file) {
  Measurements all;
  Lines lines(file);
  if (!lines.exists()) return all;
  if (!lines.next() || lines.text() != heading)
    refuse_line(file, lines.number(), "does not begin a file of measurements");
  while (lines.next()) {
    const std::string with = lines.text();
    ChainCost cost;
    std::size_t num_stages = 0;
    lines.read("chain", cost.input_bytes, cost.input_grad_bytes, cost.rounding,
               cost.cached_cast_bytes, cost.held_to_end_bytes, num_stages);
    if (lines.next_begins("moving ")) {
      MoveCost& moving = cost.moving.emplace();
      lines.read("moving", moving.store_s_per_byte, moving.load_s_per_byte, moving.held_up_share);
    }
    for (std::size_t i = 0; i < num_stages; ++i) {
      StageCost stage;
      lines.read("stage", stage.forward_s, stage.backward_s, stage.forward_to_last_save_s,
                 stage.output_bytes, stage.saved_bytes, stage.forward_tmp_bytes,
                 stage.backward_tmp_bytes, stage.grad_bytes, stage.saves_output,
                 stage.unsaved_tmp_bytes, stage.first_read_tmp_bytes, stage.stopped_tmp_bytes,
                 stage.saves_input, stage.backward_bytes, stage.region_backward_bytes,
                 stage.lone_backward_bytes);
      if (lines.next_begins("moves "))
        lines.read("moves", stage.movable_bytes, stage.has_movable_output);
      cost.stages.push_back(std::move(stage));
    }
    all.insert_or_assign(with, std::move(cost));
  }
  return all;
}

}  // namespace

namespace {

/// Returns the autocast state of the CPU and of the sample's device; empty if autocast is off.
std::string autocast_around(c10::DeviceType sample) {
  std::string text;
  const auto add = [&](c10::DeviceType type) {
    if (!at::autocast::is_autocast_available(type) || !at::autocast::is_autocast_enabled(type))
      return;
    text +=
        fmt::format(", autocast to {} on {}", c10::toString(at::autocast::get_autocast_dtype(type)),
                    c10::DeviceTypeName(type, true));
  };
  add(c10::kCPU);
  if (sample != c10::kCPU) add(sample);
  if (!text.empty() && !at::autocast::is_autocast_cache_enabled()) text += " without its cache";
  return text;
}

}  // namespace

std::string measured_with(std::size_t num_stages, const at::Tensor& sample,
                          const MeasureOptions& options) {
  std::string with =
      fmt::format("{} stages, {} {}{} on {}, warmup {}, repeats {}, LibTorch {}, {} threads",
                  num_stages, c10::toString(sample.scalar_type()), c10::str(sample.sizes()),
                  sample.requires_grad() ? " that requires grad" : "", sample.device().str(),
                  options.warmup, options.repeats, TORCH_VERSION, at::get_num_threads());
  if (!options.early_stop) with += ", without early stop";
  with += autocast_around(sample.device().type());
  if (options.moving)
    with += fmt::format(", moves of {} and more {}", options.moving->min_bytes,
                        options.moving->directory.empty()
                            ? (options.moving->pin_memory ? "to page-locked memory" : "to the CPU")
                            : "to " + options.moving->directory.string());
  return with;
}

std::optional<ChainCost> read_measurement(const std::filesystem::path& file,
                                          const std::string& with) {
  Measurements all = read_all(file);
  const auto found = all.find(with);
  if (found == all.end()) return std::nullopt;
  return std::move(found->second);
}

void add_measurement(const std::filesystem::path& file, const std::string& with,
                     const ChainCost& cost) {
  Measurements all = read_all(file);
  all.insert_or_assign(with, cost);
  const std::string beside = fmt::format("{}.{}", file.string(), ::getpid());
  std::ofstream out(beside);
  out << heading << "\n";
  for (const auto& [key, chain] : all) {
    out << key << "\n"
        << fmt::format("chain {} {} {} {} {} {}\n", chain.input_bytes, chain.input_grad_bytes,
                       chain.rounding, chain.cached_cast_bytes, chain.held_to_end_bytes,
                       chain.stages.size());
    if (chain.moving)
      out << fmt::format("moving {} {} {}\n", chain.moving->store_s_per_byte,
                         chain.moving->load_s_per_byte, chain.moving->held_up_share);
    for (const StageCost& stage : chain.stages) {
      out << fmt::format("stage {} {} {} {} {} {} {} {} {:d} {} {} {} {:d} {} {} {}\n",
                         stage.forward_s, stage.backward_s, stage.forward_to_last_save_s,
                         stage.output_bytes, stage.saved_bytes, stage.forward_tmp_bytes,
                         stage.backward_tmp_bytes, stage.grad_bytes, stage.saves_output,
                         stage.unsaved_tmp_bytes, stage.first_read_tmp_bytes,
                         stage.stopped_tmp_bytes, stage.saves_input, stage.backward_bytes,
                         stage.region_backward_bytes, stage.lone_backward_bytes);
      if (chain.moving)
        out << fmt::format("moves {} {:d}\n", stage.movable_bytes, stage.has_movable_output);
    }
  }
  out.close();
  const bool is_written = out && std::rename(beside.c_str(), file.c_str()) == 0;
  if (!is_written) std::remove(beside.c_str());
  TORCH_CHECK_VALUE(
      is_written, "remat::fit: measurements could not be written to \"", file.string(),
      "\".\nHint: name a file in a directory that exists and that this user may write to.");
}

}  // namespace remat
