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
#include <nlohmann/json.hpp>
#include <utility>

#include "lib/base/valid_text.h"

using Json = nlohmann::json;

template <class T>
struct nlohmann::adl_serializer<std::optional<T>> {
  static void to_json(Json& json, const std::optional<T>& value) {
    if (value) json = *value;
  }
  static void from_json(const Json& json, std::optional<T>& value) {
    if (!json.is_null()) value = json.get<T>();
  }
};

namespace remat {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MoveCost, store_s_per_byte, load_s_per_byte, held_up_share)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(
    StageCost, forward_s, backward_s, forward_to_last_save_s, output_bytes, saved_bytes,
    forward_tmp_bytes, backward_tmp_bytes, grad_bytes, saves_output, unsaved_tmp_bytes,
    first_read_tmp_bytes, stopped_tmp_bytes, saves_input, backward_bytes, region_backward_bytes,
    lone_backward_bytes, movable_bytes, has_movable_output)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(ChainCost, stages, input_bytes, input_grad_bytes,
                                                rounding, cached_cast_bytes, held_to_end_bytes,
                                                moving)

namespace {

constexpr const char* format = "remat measurements 6";

using Measurements = std::map<std::string, ChainCost>;

Measurements read_all(const std::filesystem::path& file) {
  std::ifstream in(file);
  if (!in.is_open()) return {};
  std::string cause;
  try {
    const Json all = Json::parse(in);
    if (all.at("format") == format) return all.at("chains").get<Measurements>();
    cause = fmt::format("its format is {}, not \"{}\".", all.at("format").dump(), format);
  } catch (const Json::exception& error) {
    cause = error.what();
  }
  TORCH_CHECK_VALUE(
      false, "remat::fit: \"", file.string(),
      "\" was not written as a file of measurements by this version of remat.\nCause: ", cause,
      "\n"
      "Hint: name a file that fit has written, or remove the file: fit then measures again.");
}

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
  return valid_text(with);
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
  out << Json{{"format", format}, {"chains", all}}.dump(1) << '\n';
  out.close();
  const bool is_written = out && std::rename(beside.c_str(), file.c_str()) == 0;
  if (!is_written) std::remove(beside.c_str());
  TORCH_CHECK_VALUE(
      is_written, "remat::fit: measurements could not be written to \"", file.string(),
      "\".\nHint: name a file in a directory that exists and that this user may write to.");
}

}  // namespace remat
