#include "lib/selective/call_graph.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

namespace remat {

namespace {

constexpr int32_t no_bit = -1;
constexpr int num_bits = 64;

/// One way to decide about the calls so far.
struct Way {
  uint64_t waiting = 0;  ///< kept values that only kept calls have read so far, by bit
  int64_t bytes = 0;
  double seconds = 0;
  int32_t before = -1;  ///< in the step before
  char keeps = 0;
};

/// What a call may at most add to seconds less the price of bytes.
double best_gain(const CallGraph& graph, const CallGraph::Call& call, double price) {
  if (!call.can_be_kept || call.is_kept_anyway) return 0;
  double gain = call.seconds;
  for (const uint32_t value : call.makes)
    if (graph.values[value].is_held) gain -= price * static_cast<double>(graph.values[value].bytes);
  return std::max(gain, 0.);
}

class WayFinder {
 public:
  WayFinder(const CallGraph& graph, std::size_t max_ways) : graph_(graph), max_ways_(max_ways) {
    assign_bits();
  }

  /// The best of at most `limit` bytes, if it spares `incumbent` seconds at least. `price` of a byte
  /// [seconds]: tells early what will not. Nothing if the ways became too many.
  std::optional<Way> find(int64_t limit, double incumbent, double price);
  /// The one with most seconds less the price of its bytes, or a better one than there is.
  Way find_priced(double price);
  std::vector<char> keeps_of(const Way& last) const;

 private:
  void assign_bits();
  Way without(const Way& way, int32_t number, const CallGraph::Call& call) const;
  Way with(const Way& way, int32_t number, const CallGraph::Call& call) const;
  template <class Add>
  void visit_next(std::size_t call, Add&& add) const;

  const CallGraph& graph_;
  const std::size_t max_ways_;
  std::vector<int32_t> bits_;  // by value
  bool lacks_bits_ = false;
  std::vector<uint64_t> waiting_no_more_;  // by call: values that it is the last to read
  std::vector<std::vector<Way>> steps_;
};

void WayFinder::assign_bits() {
  constexpr std::size_t nobody = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> last_reader(graph_.values.size(), nobody);
  for (std::size_t i = 0; i < graph_.calls.size(); ++i)
    for (const uint32_t value : graph_.calls[i].reads) last_reader[value] = i;
  bits_.assign(graph_.values.size(), no_bit);
  waiting_no_more_.assign(graph_.calls.size(), 0);
  std::vector<uint32_t> owner(num_bits);
  uint64_t used = 0;
  for (std::size_t i = 0; i < graph_.calls.size(); ++i) {
    const CallGraph::Call& call = graph_.calls[i];
    for (const uint32_t value : call.makes) {
      const bool may_wait = call.can_be_kept && !call.is_kept_anyway &&
                            !graph_.values[value].is_held && last_reader[value] != nobody;
      if (!may_wait) continue;
      for (int bit = 0; bit < num_bits && bits_[value] == no_bit; ++bit)
        if ((used >> bit & 1) == 0) bits_[value] = bit;
      lacks_bits_ = lacks_bits_ || bits_[value] == no_bit;
      if (bits_[value] == no_bit) continue;
      used |= uint64_t{1} << bits_[value];
      owner[static_cast<std::size_t>(bits_[value])] = value;
    }
    for (int bit = 0; bit < num_bits; ++bit)
      if ((used >> bit & 1) != 0 && last_reader[owner[static_cast<std::size_t>(bit)]] == i) {
        waiting_no_more_[i] |= uint64_t{1} << bit;
        used &= ~(uint64_t{1} << bit);
      }
  }
}

// It runs again and reads: what it reads must be there.
Way WayFinder::without(const Way& way, int32_t number, const CallGraph::Call& call) const {
  Way next = way;
  next.before = number;
  next.keeps = 0;
  for (const uint32_t value : call.reads) {
    if (bits_[value] == no_bit || (next.waiting >> bits_[value] & 1) == 0) continue;
    next.waiting &= ~(uint64_t{1} << bits_[value]);
    next.bytes += graph_.values[value].bytes;
  }
  return next;
}

Way WayFinder::with(const Way& way, int32_t number, const CallGraph::Call& call) const {
  Way next = way;
  next.before = number;
  next.keeps = 1;
  if (call.is_kept_anyway) return next;
  next.seconds += call.seconds;
  for (const uint32_t value : call.makes) {
    if (bits_[value] != no_bit)
      next.waiting |= uint64_t{1} << bits_[value];
    else if (graph_.values[value].is_held)
      next.bytes += graph_.values[value].bytes;
  }
  return next;
}

template <class Add>
void WayFinder::visit_next(std::size_t call, Add&& add) const {
  const CallGraph::Call& node = graph_.calls[call];
  const std::vector<Way>& ways = steps_.back();
  const auto add_one = [&](Way way) {
    way.waiting &= ~waiting_no_more_[call];
    add(way);
  };
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const auto number = static_cast<int32_t>(i);
    if (!node.is_kept_anyway) add_one(without(ways[i], number, node));
    if (node.can_be_kept || node.is_kept_anyway) add_one(with(ways[i], number, node));
  }
}

std::optional<Way> WayFinder::find(int64_t limit, double incumbent, double price) {
  constexpr std::size_t max_steps_together = 64;  // times max_ways_: of memory
  if (lacks_bits_) return std::nullopt;
  std::vector<double> rest(graph_.calls.size() + 1), rest_gain(graph_.calls.size() + 1);
  for (std::size_t i = graph_.calls.size(); i-- > 0;) {
    rest[i] = rest[i + 1] + best_gain(graph_, graph_.calls[i], 0);
    rest_gain[i] = rest_gain[i + 1] + best_gain(graph_, graph_.calls[i], price);
  }
  const double least = incumbent * (1 - 1e-12);  // sums in another order differ in the last digits
  steps_.assign(1, {Way()});
  std::size_t num_together = 0;
  for (std::size_t i = 0; i < graph_.calls.size(); ++i) {
    std::vector<Way> next;
    visit_next(i, [&](const Way& way) {
      if (way.bytes > limit || way.seconds + rest[i + 1] < least) return;
      const double room = price * static_cast<double>(limit - way.bytes);
      if (way.seconds + rest_gain[i + 1] + room < least) return;
      next.push_back(way);
    });
    // Of those that wait for the same, leaves those that spare more for more bytes.
    std::stable_sort(next.begin(), next.end(), [](const Way& a, const Way& b) {
      return std::tuple(a.waiting, a.bytes, -a.seconds) <
             std::tuple(b.waiting, b.bytes, -b.seconds);
    });
    std::size_t num_left = 0;
    for (const Way& each : next) {
      const Way* const before = num_left == 0 ? nullptr : &next[num_left - 1];
      if (before == nullptr || before->waiting != each.waiting || before->seconds < each.seconds)
        next[num_left++] = each;
    }
    next.resize(num_left);
    num_together += num_left;
    if (num_left == 0 || num_left > max_ways_ || num_together > max_steps_together * max_ways_)
      return std::nullopt;
    steps_.push_back(std::move(next));
  }
  return *std::max_element(
      steps_.back().begin(), steps_.back().end(), [](const Way& a, const Way& b) {
        return std::tuple(a.seconds, -a.bytes) < std::tuple(b.seconds, -b.bytes);
      });
}

Way WayFinder::find_priced(double price) {
  const auto worth = [price](const Way& way) {
    return way.seconds - price * static_cast<double>(way.bytes);
  };
  steps_.assign(1, {Way()});
  for (std::size_t i = 0; i < graph_.calls.size(); ++i) {
    std::vector<Way> next;
    visit_next(i, [&](const Way& way) { next.push_back(way); });
    if (next.size() > max_ways_)
      for (Way& each : next) each.waiting = 0;  // as if they took nothing
    std::stable_sort(next.begin(), next.end(), [&](const Way& a, const Way& b) {
      return std::tuple(a.waiting, -worth(a)) < std::tuple(b.waiting, -worth(b));
    });
    const auto last = std::unique(next.begin(), next.end(), [](const Way& a, const Way& b) {
      return a.waiting == b.waiting;
    });
    next.erase(last, next.end());
    steps_.push_back(std::move(next));
  }
  return *std::max_element(steps_.back().begin(), steps_.back().end(),
                           [&](const Way& a, const Way& b) { return worth(a) < worth(b); });
}

std::vector<char> WayFinder::keeps_of(const Way& last) const {
  std::vector<char> keeps(graph_.calls.size());
  Way way = last;
  for (std::size_t i = keeps.size(); i-- > 0;) {
    keeps[i] = way.keeps;
    way = steps_[i][static_cast<std::size_t>(way.before)];
  }
  return keeps;
}

ChosenCalls chosen_of(const CallGraph& graph, std::vector<char> keeps) {
  ChosenCalls chosen;
  chosen.keeps = std::move(keeps);
  for (const int64_t bytes : bytes_by_call(graph, chosen.keeps)) chosen.bytes += bytes;
  for (std::size_t i = 0; i < graph.calls.size(); ++i)
    if (chosen.keeps[i] && !graph.calls[i].is_kept_anyway) chosen.seconds += graph.calls[i].seconds;
  return chosen;
}

/// Keeps more, one call after the other, most seconds a byte first, as long as there is room.
void fill(const CallGraph& graph, int64_t limit, ChosenCalls& best) {
  std::vector<std::pair<double, std::size_t>> calls;
  for (std::size_t i = 0; i < graph.calls.size(); ++i) {
    const CallGraph::Call& call = graph.calls[i];
    if (best.keeps[i] || !call.can_be_kept || call.seconds <= 0) continue;
    int64_t bytes = 1;
    for (const uint32_t value : call.makes) bytes += graph.values[value].bytes;
    calls.emplace_back(-call.seconds / static_cast<double>(bytes), i);
  }
  std::sort(calls.begin(), calls.end());
  constexpr std::size_t max_tried = 1000;  // each looks at all calls
  if (calls.size() > max_tried) calls.resize(max_tried);
  for (const auto& [unused, call] : calls) {
    std::vector<char> keeps = best.keeps;
    keeps[call] = 1;
    if (ChosenCalls more = chosen_of(graph, std::move(keeps)); more.bytes <= limit)
      best = std::move(more);
  }
}

}  // namespace

std::vector<int64_t> bytes_by_call(const CallGraph& graph, const std::vector<char>& keeps) {
  std::vector<char> is_read(graph.values.size());
  for (std::size_t i = 0; i < graph.calls.size(); ++i)
    if (!keeps[i])
      for (const uint32_t value : graph.calls[i].reads) is_read[value] = 1;
  std::vector<int64_t> bytes(graph.calls.size());
  for (std::size_t i = 0; i < graph.calls.size(); ++i)
    if (keeps[i] && !graph.calls[i].is_kept_anyway)
      for (const uint32_t value : graph.calls[i].makes)
        if (graph.values[value].is_held || is_read[value]) bytes[i] += graph.values[value].bytes;
  return bytes;
}

// The price of a byte at which just as much is bought as there is room for, between one at which it is
// more and one at which it is less: Everett 1963.
ChosenCalls choose(const CallGraph& graph, int64_t limit, std::size_t max_labels) {
  std::vector<char> nothing;
  for (const CallGraph::Call& call : graph.calls) nothing.push_back(call.is_kept_anyway ? 1 : 0);
  ChosenCalls best = chosen_of(graph, std::move(nothing));
  double bound = std::numeric_limits<double>::infinity(), best_price = 0;
  WayFinder finder(graph, max_labels);
  double too_cheap = 0, dear = 0;
  for (const CallGraph::Call& call : graph.calls) dear += call.seconds;
  constexpr int num_prices = 40;
  for (int i = 0; i < num_prices; ++i) {
    const double price = i == 0 ? 0 : (too_cheap + dear) / 2;
    const Way way = finder.find_priced(price);
    const double spared = way.seconds + price * static_cast<double>(limit - way.bytes);
    if (spared < bound) {
      bound = spared;
      best_price = price;
    }
    ChosenCalls chosen = chosen_of(graph, finder.keeps_of(way));
    const bool has_room = chosen.bytes <= limit;
    if (has_room && chosen.seconds > best.seconds) best = std::move(chosen);
    if (has_room && i == 0) break;  // for all
    (has_room ? dear : too_cheap) = price;
  }
  fill(graph, limit, best);
  if (const auto way = finder.find(limit, best.seconds, best_price)) {
    best = chosen_of(graph, finder.keeps_of(*way));
    bound = best.seconds;
  }
  best.bound = std::max(bound, best.seconds);
  return best;
}

}  // namespace remat
