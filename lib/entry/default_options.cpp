#include "lib/entry/default_options.h"

#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <charconv>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/pattern.h"

namespace remat {

namespace {

using Options = CheckpointOptions;

/// The defaults of a process. Never deleted, since other threads may read them.
struct Defaults {
  std::string text;
  Options options{.location = {}};
};

const Defaults unread{};
/// The defaults in force; null for none, `unread` until the environment was read.
std::atomic<const Defaults*> defaults{&unread};

template <class T>
using Words = std::vector<std::pair<std::string_view, T>>;

template <class T>
T value_of(std::string_view text, const Words<T>& words) {
  std::vector<std::string_view> known;
  for (const auto& [word, value] : words) {
    if (word == text) return value;
    known.push_back(word);
  }
  TORCH_CHECK_VALUE(
      false, fmt::format("the value \"{}\" was not one of {}", text, fmt::join(known, ", ")));
}

const Words<bool> booleans{{"true", true}, {"false", false}, {"1", true}, {"0", false}};

int64_t depth_of(std::string_view text) {
  int64_t depth = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), depth);
  TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && depth >= 0,
                    fmt::format("the value \"{}\" was not a number of 0 or more", text));
  return depth;
}

/// An option with a default: reads its text, and replaces the built-in value.
struct Option {
  std::string_view name;
  std::function<void(Options& to, std::string_view text)> read;
  std::function<void(Options& to, const Options& defaults)> overlay;
};

template <auto member, class Read>
Option option(std::string_view name, Read read) {
  return {name, [read](Options& to, std::string_view text) { to.*member = read(text); },
          [](Options& to, const Options& from) {
            static const Options built_in{.location = {}};
            if (to.*member == built_in.*member) to.*member = from.*member;
          }};
}

const std::vector<Option>& all_options() {
  const auto flag = [](std::string_view text) { return value_of(text, booleans); };
  const auto check = [](std::string_view text) {
    return value_of<DeterminismCheck>(text, {{"none", DeterminismCheck::None},
                                             {"metadata", DeterminismCheck::Metadata},
                                             {"layout", DeterminismCheck::Layout},
                                             {"values", DeterminismCheck::Values}});
  };
  const auto captures = [](std::string_view text) {
    return value_of<CaptureCheck>(
        text, {{"raise", CaptureCheck::Raise}, {"ignore", CaptureCheck::Ignore}});
  };
  const auto inputs = [](std::string_view text) {
    return value_of<InputMode>(
        text, {{"shared", InputMode::Shared}, {"copy_on_write", InputMode::CopyOnWrite}});
  };
  static const auto* const all = new std::vector<Option>{
      option<&Options::preserve_rng_state>("preserve_rng_state", flag),
      option<&Options::early_stop>("early_stop", flag),
      option<&Options::determinism_check>("determinism_check", check),
      option<&Options::capture_check>("capture_check", captures),
      option<&Options::debug>("debug", flag),
      option<&Options::offload_inputs>("offload_inputs", flag),
      option<&Options::offload_prefetch_depth>("offload_prefetch_depth", depth_of),
      option<&Options::strict_unpack>("strict_unpack", flag),
      option<&Options::inputs>("input_mode", inputs)};
  return *all;
}

void read_one(Options& to, std::string_view item) {
  const std::size_t equals = item.find('=');
  TORCH_CHECK_VALUE(equals != item.npos,
                    fmt::format("\"{}\" was not of the form name=value", item));
  const std::string_view name = trimmed(item.substr(0, equals));
  std::vector<std::string_view> known;
  for (const Option& each : all_options()) {
    if (each.name == name) return each.read(to, trimmed(item.substr(equals + 1)));
    known.push_back(each.name);
  }
  TORCH_CHECK_VALUE(
      false, fmt::format("there was no option \"{}\" among {}", name, fmt::join(known, ", ")));
}

/// Reads a text of options; null for an empty one. `from`: the origin of the text, for errors.
const Defaults* read(std::string_view text, std::string_view from) {
  if (trimmed(text).empty()) return nullptr;
  auto found = std::make_unique<Defaults>();
  found->text = trimmed(text);
  for (const std::string_view item : split(found->text, ',')) {
    try {
      read_one(found->options, item);
    } catch (const c10::ValueError& error) {
      TORCH_CHECK_VALUE(false, "remat::", from, ": ", error.what_without_backtrace(),
                        ".\nHint: write it as in \"early_stop=false, determinism_check=values\".");
    }
  }
  return found.release();
}

const Defaults* in_force() {
  const Defaults* now = defaults.load(std::memory_order_acquire);
  if (now != &unread) [[likely]]
    return now;
  const auto given = c10::utils::get_env("REMAT_OPTIONS");
  const Defaults* const found = read(given.value_or(""), "REMAT_OPTIONS");
  return defaults.compare_exchange_strong(now, found, std::memory_order_acq_rel) ? found : now;
}

}  // namespace

void set_default_options(std::string_view text) {
  defaults.store(read(text, "set_default_options"), std::memory_order_release);
}

std::string default_options() {
  const Defaults* const now = in_force();
  return now == nullptr ? "" : now->text;
}

std::optional<CheckpointOptions> with_default_options(const CheckpointOptions& given) {
  const Defaults* const now = in_force();
  if (now == nullptr) [[likely]]
    return std::nullopt;
  CheckpointOptions merged = given;
  for (const Option& each : all_options()) each.overlay(merged, now->options);
  if (given.context_fn) merged.debug = given.debug;  // the two exclude each other
  return merged;
}

}  // namespace remat
