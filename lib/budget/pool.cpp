#include "lib/budget/pool.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "lib/base/byte_hash.h"
#include "lib/budget/trial.h"

namespace remat::budget {

namespace {

constexpr std::size_t num_pool_for_one = 64;  // values of a large pool for one of its shortlist

bool can_drop(const Value& value, const Pool::Now& now) {
  return value.num_locks == 0 && (!value.is_source() || value.is_away()) &&
         value.bytes >= now.min_bytes && value.bytes > 0 && value.held.use_count() == 1;
}

double score_of(const Value& value, const Pool::Now& now) {
  const double distance = std::max(now.cursor - value.look.first, 0.0) + 1e-6;
  return value.look.cost / (static_cast<double>(value.bytes) * std::sqrt(distance));
}

/// Returns the score by the latest costs; -1 if they are unknown.
double known_score(const Value& value, const Pool::Now& now) {
  return value.look.cost < 0 ? -1.0 : score_of(value, now);
}

// ---- other choices, for comparison ----

/// Returns the seconds of the dropped values that must be made again before the value.
double seconds_of_dropped_above(const Value& value, uint64_t walk) {
  double sum = 0;
  if (value.is_source()) return sum;  // it is read back
  value.record->walk = walk;
  std::vector<const Record*> waiting{value.record};
  while (!waiting.empty()) {
    const Record& record = *waiting.back();
    waiting.pop_back();
    for (const Read& read : record.reads) {
      Record* const made_by = read.value->record;
      if (made_by == nullptr || made_by->walk == walk || read.value->is_available()) continue;
      made_by->walk = walk;
      sum += made_by->cost;
      waiting.push_back(made_by);
    }
  }
  return sum;
}

/// Returns the seconds of the dropped values that are made of the value.
double seconds_of_dropped_below(const Value& value, uint64_t walk) {
  double sum = 0;
  std::vector<const Value*> waiting{&value};
  while (!waiting.empty()) {
    const Value& made_of = *waiting.back();
    waiting.pop_back();
    for (const Read* read = made_of.reads; read != nullptr; read = read->next) {
      if (read->record->walk == walk) continue;
      read->record->walk = walk;
      bool is_counted = false;
      for (const Value* const result : read->record->results) {
        if (result == nullptr || result->is_available()) continue;
        if (!is_counted) sum += read->record->cost;
        is_counted = true;
        waiting.push_back(result);
      }
    }
  }
  return sum;
}

double score_in_trial(Choice choice, const Value& value, double now) {
  const double stale_s = now - value.last_use + 1e-7;
  switch (choice) {
    case Choice::LeastRecent:
      return 1 / stale_s;
    case Choice::Size:
      return 1 / static_cast<double>(value.bytes);
    default:
      break;
  }
  const double above_s = seconds_of_dropped_above(value, next_walk());
  const double below_s = seconds_of_dropped_below(value, next_walk());
  const double own_s = value.is_source() ? 0 : value.record->cost;
  return (own_s + above_s + below_s) / (static_cast<double>(value.bytes) * stale_s);
}

/// Returns the value that the choice of a trial drops; null if no value can be dropped.
Value* choose_in_trial(Trial& trial, c10::ArrayRef<Value*> values, const Pool::Now& now) {
  std::vector<Value*> droppable;
  for (Value* const value : values)
    if (can_drop(*value, now)) droppable.push_back(value);
  if (droppable.empty()) return nullptr;
  if (trial.choice == Choice::Random) {
    trial.seed = combine(trial.seed, odd_multiplier);
    return droppable[trial.seed % droppable.size()];
  }
  Value* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (Value* const value : droppable) {
    const double found = score_in_trial(trial.choice, *value, now.clock);
    if (found >= least) continue;
    least = found;
    best = value;
  }
  return best;
}

}  // namespace

void Pool::put(Value& value) {
  value.pooled.place = static_cast<int32_t>(values_.size());
  values_.push_back(&value);
  ++num_added_;
  if (!value.is_source() || value.is_away()) count(value);
}

void Pool::count(Value& value) {
  if (!std::exchange(value.pooled.is_counted, true)) bytes_ += value.bytes;
}

void Pool::remove(Value& value) {
  if (value.pooled.place < 0) return;
  const auto place = static_cast<std::size_t>(std::exchange(value.pooled.place, -1));
  values_[place] = values_.back();
  if (values_[place] != &value) values_[place]->pooled.place = static_cast<int32_t>(place);
  values_.pop_back();
  if (std::exchange(value.pooled.is_counted, false)) bytes_ -= value.bytes;
  if (std::exchange(value.pooled.is_short, false))
    *std::find(shortlist_.begin(), shortlist_.end(), &value) = nullptr;
}

bool Pool::has_grown() {
  constexpr std::size_t share = 16;
  if (num_added_ * share < values_.size()) return false;
  num_added_ = 0;
  return true;
}

void look_closely(Value& value) {
  constexpr std::size_t max_seen = 64;
  std::array<const Record*, max_seen> records;
  std::size_t num_seen = 0;
  const uint64_t walk = next_walk();
  double cost = 0;
  if (value.is_away()) {
    cost = value.moved->seconds_back();
  } else {
    records[num_seen++] = value.record;
    value.record->walk = walk;
    cost = value.record->cost;
  }
  for (std::size_t next = 0; next < num_seen; ++next)
    for (const Read& read : records[next]->reads) {
      Record* const made_by = read.value->record;
      if (read.value->is_away() && !read.value->has_content())
        cost += read.value->moved->seconds_back();
      if (made_by == nullptr || made_by->walk == walk || read.value->is_available()) continue;
      if (num_seen == max_seen) break;
      made_by->walk = walk;
      records[num_seen++] = made_by;
      cost += made_by->cost;
    }
  double first = value.last_save();
  std::array<const Value*, max_seen> made_of;
  num_seen = 0;
  made_of[num_seen++] = &value;
  std::size_t num_records = 0;
  const uint64_t walk_down = next_walk();
  for (std::size_t next = 0; next < num_seen; ++next)
    for (const Read* read = made_of[next]->reads; read != nullptr; read = read->next) {
      if (read->record->walk == walk_down || num_records == max_seen) continue;
      read->record->walk = walk_down;
      ++num_records;
      for (const Value* const result : read->record->results) {
        if (result == nullptr || result->is_available()) continue;
        first = std::max(first, result->last_save());
        if (num_seen < max_seen) made_of[num_seen++] = result;
      }
    }
  value.look.cost = first >= 0 ? static_cast<float>(cost) : 0;
  value.look.first = first;
}

Value* Pool::cheapest_of(c10::ArrayRef<Value*> values, const Now& now) {
  constexpr std::size_t num_close = 16;
  std::array<std::pair<double, Value*>, num_close> cheapest;
  std::size_t count = 0;
  for (Value* const value : values) {
    if (value == nullptr || !can_drop(*value, now)) continue;
    const double score = known_score(*value, now);
    if (count == num_close && score >= cheapest[count - 1].first) continue;
    std::size_t place = count < num_close ? count++ : count - 1;
    for (; place > 0 && cheapest[place - 1].first > score; --place)
      cheapest[place] = cheapest[place - 1];
    cheapest[place] = {score, value};
  }
  Value* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < count; ++i) {
    look_closely(*cheapest[i].second);
    const double score = score_of(*cheapest[i].second, now);
    if (score < least) {
      least = score;
      best = cheapest[i].second;
    }
  }
  return best;
}

void Pool::make_shortlist(const Now& now) {
  std::vector<std::pair<double, Value*>> all;
  all.reserve(values_.size());
  for (Value* const value : values_)
    if (can_drop(*value, now)) all.emplace_back(known_score(*value, now), value);
  const std::size_t count = std::min(all.size(), values_.size() / num_pool_for_one);
  std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count), all.end());
  for (Value* const value : shortlist_)
    if (value != nullptr) value->pooled.is_short = false;
  shortlist_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    all[i].second->pooled.is_short = true;
    shortlist_.push_back(all[i].second);
  }
  num_choices_left_ = count / 2;
}

// A large pool is not walked for each choice: the work would grow with the square of its size.
Value* Pool::choose(const Now& now) {
  constexpr std::size_t max_walked = 1024;
  if (Trial& trial = Trial::get(); trial.choice != Choice::Reverse)
    return choose_in_trial(trial, values_, now);
  if (values_.size() <= max_walked) return cheapest_of(values_, now);
  if (num_choices_left_ > 0) {
    --num_choices_left_;
    if (Value* const value = cheapest_of(shortlist_, now)) return value;
  }
  make_shortlist(now);
  if (Value* const value = cheapest_of(shortlist_, now)) return value;
  return cheapest_of(values_, now);
}

}  // namespace remat::budget
