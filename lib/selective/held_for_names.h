#pragma once
// The results of a region's calls that may get a name later, with which their calls are kept.

#include <vector>

#include "lib/selective/kept_record.h"

namespace remat {

/// Call its functions under the record's lock.
class HeldForNames {
 public:
  explicit HeldForNames(KeptRecord& record) : record_(record) {}
  /// Notes the results of a call in its record, which is the record's last one.
  void add(const KeptIndex& call, c10::ArrayRef<c10::IValue> results, Freed& freed);
  /// Appends the results of a call, of which `value` is one, to `results`. Returns false if some
  /// are gone.
  bool find_results(const KeptIndex& call, const at::Tensor& value,
                    std::vector<c10::IValue>& results) const;
  /// Releases the results when the forward is over.
  void release(Freed& freed);

 private:
  KeptRecord& record_;
  std::vector<KeptIndex> calls_;  ///< with results that have no other owner
};

}  // namespace remat
