// The tree of a plan, and its text.

#include "remat/plan.h"

#include <algorithm>
#include <utility>

#include "lib/plan/cost.h"

namespace remat {

namespace {

constexpr std::string_view kOpen = "ck[", kMove = "mv[";

// Note [Plans are flat]
// A plan is stored as the list of its regions in the order in which they open. The spans of a tree
// do not overlap partly, and the order tells which of two equal spans is the outer one. So the list
// determines the tree. A tree of nodes would have to be copied, compared and destroyed by
// recursion, and plans of 10,000 levels are legal. The functions here walk the list with a stack of
// their own.

[[noreturn]] void refuse(std::string_view text, std::size_t position, const std::string& fact) {
  constexpr std::size_t kShown = 160, kBefore = 60;
  std::string shown(text);
  if (text.size() > kShown) {
    const std::size_t from = position > kBefore ? position - kBefore : 0;
    shown = (from > 0 ? "..." : "") + std::string(text.substr(from, kShown)) +
            (from + kShown < text.size() ? "..." : "");
  }
  TORCH_CHECK_VALUE(
      false, "remat::Plan::parse: ", fact, " at position ", position, ".\n  text: ", shown,
      "\n"
      "Hint: write the stages from 1 on, each once and in order, regions as ck[...] and moved "
      "items as mv[...], separated by single spaces: [ck[ck[1] 2] mv[ck[3]] 4 5]");
}

/// Describes the character at a position, for an error.
std::string found(std::string_view text, std::size_t position) {
  if (position >= text.size()) return "the end of the text was found";
  return c10::str("'", text[position], "' was found");
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Plan parse() {
    expect("[", "a plan begins with '['");
    open_.push_back(kNone);
    while (!open_.empty()) {
      item();
      while (!open_.empty() && next_is("]")) close();
      if (open_.size() == 1 && is_moving_) fail("']' after the moved item was expected");
      if (!open_.empty()) expect(" ", "a space and another item, or ']', was expected");
    }
    if (position_ != text_.size()) fail("nothing was expected after the plan");
    return Plan(stage_, std::move(regions_), std::move(moved_));
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  void item() {
    if (open_.size() == 1 && next_is(kMove)) {
      moved_.push_back(stage_ + 1);
      is_moving_ = true;
    }
    while (next_is(kOpen)) {
      open_.push_back(regions_.size());
      regions_.push_back({stage_ + 1, 0});
    }
    number();
  }

  /// Returns the number at this position; 0 without digits.
  int64_t digits() {
    const std::size_t start = position_;
    int64_t value = 0;
    while (position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9') {
      // No chain can have as many stages as a longer number says.
      if (position_ - start >= 18) refuse(text_, start, "a number has too many digits");
      value = 10 * value + (text_[position_++] - '0');
    }
    return value;
  }

  void number() {
    const std::size_t start = position_;
    const int64_t value = digits();
    if (position_ == start && next_is(kMove))
      refuse(text_, start,
             "'mv[' was found in another bracket: moved items are outside of "
             "regions,");
    if (position_ == start) fail(c10::str("stage ", stage_ + 1, " or 'ck[' was expected"));
    if (value != stage_ + 1 || text_[start] == '0')
      refuse(text_, start,
             c10::str("stage ", stage_ + 1, " was expected, but '",
                      text_.substr(start, position_ - start), "' was found"));
    stage_ = value;
  }

  void close() {
    // At this depth, the bracket may be that of 'mv[', which is around an item of the plan itself.
    if (open_.size() == 1 && std::exchange(is_moving_, false)) return;
    if (open_.back() != kNone) regions_[open_.back()].last = stage_;
    open_.pop_back();
  }

  bool next_is(std::string_view word) {
    if (text_.substr(position_, word.size()) != word) return false;
    position_ += word.size();
    return true;
  }
  void expect(std::string_view word, const char* fact) {
    if (!next_is(word)) fail(fact);
  }
  [[noreturn]] void fail(const std::string& fact) {
    refuse(text_, position_, fact + ", but " + found(text_, position_));
  }

  std::string_view text_;
  std::size_t position_ = 0;
  int64_t stage_ = 0;
  bool is_moving_ = false;  // inside a bracket of 'mv['
  std::vector<std::size_t> open_;
  std::vector<PlanRegion> regions_;
  std::vector<int64_t> moved_;
};

}  // namespace

Plan::Plan(int64_t stages, std::vector<PlanRegion> regions, std::vector<int64_t> moved)
    : stages_(stages), regions_(std::move(regions)), moved_(std::move(moved)) {
  TORCH_CHECK_VALUE(stages >= 1, "remat::Plan: a plan needs at least 1 stage, got ", stages, ".");
  std::vector<PlanRegion> open{{1, stages}};
  int64_t first = 1;
  for (const PlanRegion& region : regions_) {
    TORCH_CHECK_VALUE(region.first >= first && region.first <= region.last && region.last <= stages,
                      "remat::Plan: a region of stages ", region.first, " to ", region.last,
                      " is empty, outside of 1 to ", stages,
                      ", or comes after one that begins later.");
    while (open.back().last < region.first) open.pop_back();
    TORCH_CHECK_VALUE(region.last <= open.back().last, "remat::Plan: a region of stages ",
                      region.first, " to ", region.last, " overlaps one of stages ",
                      open.back().first, " to ", open.back().last, ".");
    open.push_back(region);
    first = region.first;
  }
  check_moved();
}

void Plan::check_moved() const {
  int64_t begin = 1, end = 0;  // stages of an item
  std::size_t region = 0;
  for (std::size_t i = 0; i < moved_.size(); ++i) {
    TORCH_CHECK_VALUE(moved_[i] >= (i == 0 ? 1 : moved_[i - 1] + 1) && moved_[i] <= stages_,
                      "remat::Plan: a moved item begins with stage ", moved_[i],
                      ", which is out of order, or outside of 1 to ", stages_, ".");
    for (; end < moved_[i]; end = std::max(end, begin)) {
      begin = end + 1;
      while (region < regions_.size() && regions_[region].first <= begin) {
        if (regions_[region].first == begin) end = std::max(end, regions_[region].last);
        ++region;
      }
    }
    TORCH_CHECK_VALUE(begin == moved_[i], "remat::Plan: a moved item begins with stage ", moved_[i],
                      ", which is inside of a region.\n"
                      "Hint: move whole regions, or stages outside of regions.");
    TORCH_CHECK_VALUE(end < stages_, "remat::Plan: the last item, from stage ", moved_[i],
                      ", is moved, but backward needs it at once.\n"
                      "Hint: do not move the last item.");
  }
}

Plan Plan::parse(std::string_view text) { return Parser(text).parse(); }

std::string Plan::to_string() const {
  std::string text = "[";
  std::vector<int64_t> open;  // last stages of the open regions
  std::size_t next = 0, next_moved = 0;
  bool moves = false;
  for (int64_t stage = 1; stage <= stages_; ++stage) {
    if (stage > 1) text += ' ';
    if (next_moved < moved_.size() && moved_[next_moved] == stage) {
      ++next_moved;
      moves = true;
      text += kMove;
    }
    for (; next < regions_.size() && regions_[next].first == stage; ++next) {
      text += kOpen;
      open.push_back(regions_[next].last);
    }
    text += std::to_string(stage);
    for (; !open.empty() && open.back() == stage; open.pop_back()) text += ']';
    if (open.empty() && std::exchange(moves, false)) text += ']';
  }
  return text + ']';
}

std::vector<std::vector<PlanItem>> items_of(const Plan& plan) {
  std::vector<std::vector<PlanItem>> items(plan.regions().size() + 1);
  std::vector<std::size_t> open{0};
  std::size_t next = 1;
  for (int64_t stage = 1; stage <= plan.stages(); ++stage) {
    for (; next < items.size() && plan.regions()[next - 1].first == stage; ++next) {
      items[open.back()].push_back(-static_cast<PlanItem>(next));
      open.push_back(next);
    }
    items[open.back()].push_back(stage);
    while (open.size() > 1 && plan.regions()[open.back() - 1].last == stage) open.pop_back();
  }
  return items;
}

bool moves_anything(const Plan& plan) { return !plan.moved().empty(); }

int64_t Plan::depth() const {
  std::size_t deepest = 0;
  std::vector<int64_t> open;
  for (const PlanRegion& region : regions_) {
    while (!open.empty() && open.back() < region.first) open.pop_back();
    open.push_back(region.last);
    deepest = std::max(deepest, open.size());
  }
  return static_cast<int64_t>(deepest);
}

std::vector<int64_t> Plan::calls() const {
  // A recompute runs the stages of its region up to an inner region that ends with it: of that one
  // it needs no more than the input (Rule 5). The last child of a region comes last in the list.
  std::vector<int64_t> reached(regions_.size());
  for (std::size_t i = 0; i < regions_.size(); ++i) reached[i] = regions_[i].last;
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    while (!open.empty() && regions_[open.back()].last < regions_[i].first) open.pop_back();
    if (!open.empty() && regions_[open.back()].last == regions_[i].last)
      reached[open.back()] = regions_[i].first - 1;
    open.push_back(i);
  }
  std::vector<int64_t> change(static_cast<std::size_t>(stages_) + 1, 0);
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    ++change[static_cast<std::size_t>(regions_[i].first) - 1];
    --change[static_cast<std::size_t>(reached[i])];
  }
  int64_t calls = 1;
  for (int64_t& each : change) each = calls += each;
  change.pop_back();
  return change;
}

}  // namespace remat
