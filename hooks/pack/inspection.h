#pragma once
// An inspection of saved variables that returns none of their tensors and computes nothing.

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace remat {

/// A description of the tensor that a hook keeps, or would compute, for one saved variable.
struct HeldInfo {
  std::vector<int64_t> sizes{};
  at::ScalarType dtype = at::ScalarType::Undefined;
  int64_t bytes = 0;
  std::string region{};
  bool dropped = false;
  const void* owner = nullptr;  ///< what has the bytes, if several hooks may share it
  c10::intrusive_ptr<c10::intrusive_ptr_target> frame{};  ///< of a region's slot
};

/// While alive, hooks of this thread record a description of their tensor, and return an empty
/// tensor instead.
class Inspection {
 public:
  Inspection() : previous_(std::exchange(current_, this)) {}
  ~Inspection() { current_ = previous_; }
  Inspection& operator=(Inspection&&) = delete;

  static Inspection* current() { return current_; }

  at::Tensor note(HeldInfo info);
  bool is_stand_in(const at::Tensor& tensor) const;
  std::vector<HeldInfo>& found() { return found_; }

 private:
  static thread_local Inspection* current_;
  Inspection* const previous_;
  std::vector<HeldInfo> found_;
  std::vector<at::Tensor> stand_ins_;
};

}  // namespace remat
