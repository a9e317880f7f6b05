#pragma once
// One recompute of a region that keeps results: answers operator calls with them.

#include <c10/util/SmallVector.h>

#include <mutex>
#include <string>
#include <typeinfo>
#include <vector>

#include "lib/frame/filler.h"
#include "lib/frame/frame.h"
#include "lib/frame/frame_scope.h"
#include "lib/frame/keeper.h"
#include "lib/selective/kept_gradients.h"
#include "lib/selective/kept_record.h"
#include "lib/selective/operator_handler.h"
#include "remat/error.h"

namespace remat {

class Replay final : public KeptReplay, public OperatorHandler {
 public:
  /// Fetches the kept values that come through hooks, which may make the enclosing region
  /// recompute. `inputs`: the region's inputs for this recompute.
  Replay(Frame& frame, const KeptRecord& record, Filler& filler,
         const std::vector<at::Tensor>& inputs);
  /// Returns the replay of a recompute's scope; null if its region keeps nothing, or this thread
  /// does not belong to it.
  static Replay* of(detail::RegionScope& recompute) {
    return static_cast<Replay*>(recompute.operators());
  }

  /// Returns the next pin in forward's order; null if forward kept nothing for it. Skips the pin's
  /// draws. Throws if forward's pin was of another type. `named`: the tensor that gets a name; it
  /// replaces a kept value that was changed in place, if the policy allows that and `named` is
  /// another tensor.
  const PinRecord* next_pin(const std::type_info& type, const at::Tensor* named = nullptr);
  /// Returns the values of a pin. `sources`: edges to which gradients of the values may lead.
  /// `arguments`: those of save_region's function.
  std::vector<at::Tensor> values_of(const PinRecord& pin, torch::autograd::edge_list sources,
                                    const std::vector<at::Tensor>& arguments = {});
  /// Fills the slots of the arguments that save_region's function saved in forward. May end the
  /// recompute.
  void fill_slots(const PinRecord& pin, FrameScope& region,
                  const std::vector<at::Tensor>& arguments);

  // Functions of OperatorHandler.
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack,
           const detail::RegionScope& region, bool is_outermost) override;
  int64_t before_inner(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments) override;
  void after_inner(const c10::OperatorHandle& op, int64_t call, c10::ArrayRef<c10::IValue> results,
                   const StoragesOf& given) override;
  void note_mismatch() override;

  // Functions of KeptReplay.
  OperatorHandler* operators() override { return this; }
  bool is_copy(const c10::StorageImpl* storage) const override;
  void check_backward(const torch::autograd::edge_list& roots,
                      const torch::autograd::edge_list& targets) override;
  void end() override { roles_.clear(); }
  void finish(const std::exception_ptr& thrown) override;

 private:
  struct Counted {
    int64_t op;  ///< number in the record; from `first_stranger` on, in `strangers_`
    uint32_t call;
  };
  struct Mismatch {
    CheckpointError::Kind kind;
    std::string fact, cause, advice, lists;
    TensorIdentity tensor;  ///< named in the fact, if it has a name
  };
  template <class Attempt>
  bool go_on_after_mismatch(Attempt&& attempt);
  void answer(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  const PinRecord* find_next_pin(const std::type_info& type, const at::Tensor* named);
  Counted count(const c10::OperatorHandle& op);
  void run_for_real(const c10::OperatorHandle& op, torch::jit::Stack& stack, Counted counted);
  void check_arguments(const CallRecord& record, const c10::OperatorHandle& op, Counted counted,
                       c10::ArrayRef<c10::IValue> arguments);
  std::string difference(const ArgumentRecord& then, const at::Tensor& now);
  /// Takes its locks itself, since it may wait for values that other threads are loading.
  void push_results(const CallRecord& record, torch::jit::Stack& stack, Counted counted);
  [[noreturn]] void mismatch(const c10::OperatorHandle& op, Counted counted,
                             c10::ArrayRef<c10::IValue> arguments, const CallRecord* record,
                             const std::string& fact);
  [[noreturn]] void fail(CheckpointError::Kind kind, const std::string& fact,
                         const std::string& cause, const std::string& advice,
                         const TensorIdentity& tensor = {});
  bool is_handed_out(const at::Tensor& tensor) const;
  at::Tensor restore(const KeptTensor& kept);

  Frame& frame_;
  Filler& filler_;
  const KeptRecord& record_;
  mutable std::recursive_mutex mutex_;  // a backward inside may run on other threads
  const std::vector<at::Tensor> given_;
  std::vector<std::pair<const c10::StorageImpl*, int64_t>> inputs_;  // with their number in forward
  std::vector<uint32_t> counts_;
  std::vector<c10::OperatorHandle> strangers_;  // operators that forward did not call
  std::vector<uint32_t> sequence_;
  ValueSources sources_;
  KeptGradients roles_;
  /// Values that came through hooks. They are fetched before the function runs: autograd is off
  /// while an operator is handled, and the enclosing region could not recompute there.
  std::unordered_map<const KeptTensor*, at::Tensor> fetched_;
  std::vector<const c10::StorageImpl*> handed_out_;
  StorageSet copies_;
  bool looks_ = false;  ///< whether it handles operators
  std::size_t next_pin_ = 0;
  std::exception_ptr mismatch_;
};

}  // namespace remat
