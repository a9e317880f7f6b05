#pragma once
// The calls of a region as far as keeping results is concerned, and the best choice among them.
//
// Note [What keeping spares]
// A recompute runs every call again that is not kept, whether anybody needs its result or not, until it
// stops. So a kept call spares its own time and no other's. What it takes is decided by its readers: a
// result that autograd does not save and that only kept calls read becomes a placeholder when forward
// ends (Note [Kept values]), so a chain of kept calls costs no more than what leaves it. So the choice
// is a knapsack whose weights depend on the choice: NP-hard, but regions are small, and few results
// wait at once for their readers.
//
// Note [The best choice]
// `choose` goes through the calls in order. A state is which kept results have so far been read by kept
// calls only (they may stay placeholders), and per state there is a front: more bytes only for more
// seconds. That is exact. A price of a byte, at which about as much is worth keeping as there is room
// for, tells early which ways lead to nothing. It is found first, by choices without a limit, of
// which there is but one a state. These are also what there is where the fronts become too long: the
// best of them within the limit, and a bound that no choice exceeds.

#include <cstdint>
#include <vector>

namespace remat {

struct CallGraph {
  /// A storage that a call of the region made.
  struct Value {
    int64_t bytes = 0;
    bool is_held = false;  ///< autograd saves it, or others than these calls read it
  };
  struct Call {
    double seconds = 0;  ///< that a recompute is spared
    bool can_be_kept = false;
    bool is_kept_anyway = false;  ///< by another policy
    std::vector<uint32_t> reads{},
        makes{};  ///< values; what a view reads is read by who reads the view
  };
  std::vector<Value> values;
  std::vector<Call> calls;
};

struct ChosenCalls {
  std::vector<char> keeps;  ///< by call; also those that are kept anyway
  int64_t bytes = 0;        ///< of what is kept by choice
  double seconds = 0;       ///< spared by it
  double bound = 0;         ///< no choice spares more
};

/// [bytes] that each kept call takes, by call.
std::vector<int64_t> bytes_by_call(const CallGraph& graph, const std::vector<char>& keeps);
/// The choice of at most `limit` bytes that spares the most seconds; with more than `max_labels` ways a
/// call, a good one.
ChosenCalls choose(const CallGraph& graph, int64_t limit, std::size_t max_labels = 1 << 14);

}  // namespace remat
