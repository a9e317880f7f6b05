#pragma once
// Draws the random numbers of a region's forward again in one recompute, from all its generators.

#include <list>
#include <optional>

#include "lib/rng/draws.h"

namespace remat {

/// One recompute draws from these replays. Lives as long as threads may have inherited its scope.
class RecomputeDraws final : public DrawSource {
 public:
  /// A log of forward, which outlives it; the default generator's first.
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
  /// Whether numbers were taken past the operators: where the function ends must be looked at.
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

/// While alive the generators that a recompute may set are set, each as GeneratorSwap says.
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
  /// Whether another thread took or set numbers meanwhile.
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
