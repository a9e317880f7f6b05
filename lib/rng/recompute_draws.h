#pragma once
// Draws the random numbers of a region's forward again in one recompute, from all its generators.

#include <list>
#include <optional>

#include "lib/rng/draws.h"

namespace remat {

/// The replays of one recompute. Lives as long as threads may have inherited its scope.
class RecomputeDraws final : public DrawSource {
 public:
  /// Adds a log of forward, which must outlive it; the default generator's first.
  void add(DrawLog& log) {
    if (first_)
      more_.emplace_back(log);
    else
      first_.emplace(log);
  }
  DrawReplay* draw_replay(const c10::GeneratorImpl& generator) override {
    DrawReplay* found = nullptr;
    visit([&](DrawReplay& each) {
      if (&each.original() == &generator) found = &each;
    });
    return found;
  }
  /// Returns whether numbers were taken without an operator, so that the generator's position must
  /// be checked when the function ends.
  bool uses_original() {
    bool uses = false;
    visit([&](DrawReplay& each) { uses = uses || each.plan().uses_original(); });
    return uses;
  }

 private:
  friend class DrawSwaps;
  template <class Visitor>
  void visit(Visitor&& visitor) {
    if (first_) visitor(*first_);
    for (DrawReplay& each : more_) visitor(each);
  }
  std::optional<DrawReplay> first_;
  std::list<DrawReplay> more_;
};

/// Sets the generators that a recompute may set while alive, each like GeneratorSwap.
class DrawSwaps {
 public:
  explicit DrawSwaps(RecomputeDraws& draws) {
    draws.visit([this](const DrawReplay& each) {
      if (first_)
        more_.emplace_back(each);
      else
        first_.emplace(each);
    });
  }
  /// Returns whether another thread took or set numbers meanwhile.
  bool were_disturbed() const {
    if (first_ && first_->was_disturbed()) return true;
    for (const GeneratorSwap& each : more_)
      if (each.was_disturbed()) return true;
    return false;
  }

 private:
  std::optional<GeneratorSwap> first_;
  std::list<GeneratorSwap> more_;
};

}  // namespace remat
