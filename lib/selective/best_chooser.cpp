#include "lib/selective/best_chooser.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "lib/base/counters.h"
#include "lib/seam/warn.h"
#include "lib/selective/best_profiles.h"
#include "lib/selective/op_traits.h"
#include "lib/selective/policy_rule.h"

namespace remat {

namespace {

/// Who goes another way more often than that keeps nothing of it.
constexpr int max_rounds = 4;
/// Who measures waits so many runs for one that it does not know.
constexpr int max_known = 100;

bool is_same_way(const MeasuredCalls& a, const MeasuredCalls& b) {
  return a.graph.values.size() == b.graph.values.size() &&
         std::equal(a.calls.begin(), a.calls.end(), b.calls.begin(), b.calls.end(),
                    [](const MeasuredCalls::Call& x, const MeasuredCalls::Call& y) {
                      return x.op->name_number == y.op->name_number && x.arguments == y.arguments &&
                             x.bytes == y.bytes;
                    });
}

void take_least(MeasuredCalls& into, const MeasuredCalls& other) {
  for (std::size_t i = 0; i < into.calls.size(); ++i) {
    into.calls[i].seconds = std::min(into.calls[i].seconds, other.calls[i].seconds);
    double& spared = into.graph.calls[i].seconds;
    spared = std::min(spared, other.graph.calls[i].seconds);
    into.graph.calls[i].can_be_kept &= other.graph.calls[i].can_be_kept;
  }
  for (std::size_t i = 0; i < into.graph.values.size(); ++i)
    into.graph.values[i].is_held |= other.graph.values[i].is_held;
}

BestChoice shown(const std::string& name, const ChosenWay& way) {
  BestChoice choice{name, {}, way.chosen.bytes, way.chosen.seconds, way.chosen.bound};
  const std::vector<int64_t> bytes = bytes_by_call(way.measured.graph, way.chosen.keeps);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const MeasuredCalls::Call& call = way.measured.calls[i];
    choice.calls.push_back({call.op->name, way.measured.graph.calls[i].seconds, call.bytes,
                            bytes[i], way.chosen.keeps[i] != 0});
  }
  return choice;
}

}  // namespace

BestChooser::BestChooser(SaveBestOptions options) : options_(std::move(options)) {
  if (options_.profiles.empty()) return;
  for (auto& [name, ways] : read_profiles(options_.profiles)) {
    Known& region = known(name);
    region.num_to_measure = 0;
    for (MeasuredCalls& measured : ways) {
      auto way = std::make_shared<ChosenWay>();
      way->chosen = choose(measured.graph, options_.bytes);
      way->measured = std::move(measured);
      region.ways.push_back(std::move(way));
    }
  }
}

void BestChooser::write_profile_of(const std::string& name) {
  if (options_.profiles.empty()) return;
  ChosenWays ways;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ways = known(name).ways;
  }
  try {
    write_profile(options_.profiles, name, ways);
  } catch (const c10::Error& error) {  // the program need not end for that
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (std::exchange(has_warned_, true)) return;
    }
    seam::warn(seam::text_of(error));
  }
}

BestChooser::Known& BestChooser::known(const std::string& name) {
  const auto [place, is_new] = regions_.try_emplace(name);
  if (is_new) {
    place->second.num_to_measure = options_.profile_runs;
    place->second.number = regions_.size();
  }
  return place->second;
}

BestChooser::Begin BestChooser::begin(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Known& region = known(name);
  return {region.ways, region.num_to_measure > 0};
}

void BestChooser::end(const std::string& name, bool is_new, std::size_t num_ways,
                      std::unique_ptr<MeasuredCalls> measured) {
  std::vector<std::unique_ptr<MeasuredCalls>> complete;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Known& region = known(name);
    // Another thread chooses, or has: it may have chosen for this run's way, which would be there twice.
    if (is_new && (region.is_choosing || num_ways != region.ways.size())) return;
    if (region.num_to_measure == 0) {
      if (!is_new || region.num_rounds > max_rounds) return;
      region.num_known = 0;
      if (++region.num_rounds <= max_rounds)
        region.num_to_measure = options_.profile_runs;
      else
        seam::warn(c10::str(
            "remat::save_best: region \"", name,
            "\" ran other operators, or shapes, than in the runs that were measured, for the ",
            max_rounds,
            "th time. From now on nothing is kept of such runs. Do: give regions that do "
            "different things different names (CheckpointOptions::name), or policies of their own."));
      return;
    }
    if (measured == nullptr) return;
    // The way that was new may come again much later.
    const bool gives_up = !is_new && ++region.num_known > max_known;
    if (!is_new && !gives_up) return;
    if (is_new) {
      const auto same =
          std::find_if(region.measured.begin(), region.measured.end(),
                       [&](const auto& each) { return is_same_way(*each, *measured); });
      if (same != region.measured.end())
        take_least(**same, *measured);
      else
        region.measured.push_back(std::move(measured));
    }
    region.num_to_measure = gives_up ? 0 : region.num_to_measure - 1;
    if (region.num_to_measure > 0 || region.measured.empty()) return;
    complete = std::exchange(region.measured, {});
    region.is_choosing = true;
  }
  std::vector<std::shared_ptr<ChosenWay>> chosen;
  for (auto& each : complete) {
    auto way = std::make_shared<ChosenWay>();
    way->chosen = choose(each->graph, options_.bytes);
    way->measured = std::move(*each);
    chosen.push_back(std::move(way));
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Known& region = known(name);
    region.is_choosing = false;
    // Regions with this number or a later one look for it after it is there.
    const int64_t since = live_counters.frames_created.load();
    for (auto& each : chosen) {
      each->since = since;
      region.ways.push_back(std::move(each));
    }
  }
  write_profile_of(name);
}

std::vector<BestChoice> BestChooser::choices() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<std::size_t, const std::string*>> names;
  for (const auto& [name, region] : regions_) names.emplace_back(region.number, &name);
  std::sort(names.begin(), names.end());
  std::vector<BestChoice> choices;
  for (const auto& [number, name] : names)
    for (const auto& way : regions_[*name].ways) choices.push_back(shown(*name, *way));
  return choices;
}

Policy save_best(SaveBestOptions options) {
  TORCH_CHECK_VALUE(options.bytes >= 0, "remat::save_best: bytes was ", options.bytes,
                    ". Do: give the bytes that a region may keep, 0 or more.");
  TORCH_CHECK_VALUE(options.profile_runs >= 1, "remat::save_best: profile_runs was ",
                    options.profile_runs, ". Do: let at least one run be measured.");
  options.selective.allow_cache_entry_mutation = true;
  const SelectiveOptions selective = options.selective;
  return PolicyRule::policy(std::make_shared<const PolicyRule>(
      std::make_shared<BestChooser>(std::move(options)), selective));
}

std::vector<BestChoice> best_choices(const Policy& policy) {
  const auto& rule = PolicyRule::of(policy);
  return rule == nullptr || rule->chooser() == nullptr ? std::vector<BestChoice>()
                                                       : rule->chooser()->choices();
}

}  // namespace remat
