#pragma once
// A process group of two that needs one process: each collective computes what a partner with other
// data would send, and is counted.

#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <vector>

#include "tests/support/support.h"

namespace remat::testing {

class LocalBackend final : public c10d::Backend {
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  struct Done final : c10d::Work {
    bool wait(std::chrono::milliseconds) override { return true; }
  };

 public:
  LocalBackend() : Backend(0, 2) {}
  const std::string getBackendName() const override { return "local"; }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return write(tensors[0], tensors[0] * 3);
  }
  WorkPointer alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>&,
                            std::vector<int64_t>&, const c10d::AllToAllOptions&) override {
    return write(output, input.flip(0));
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions&) override {
    outputs[0][1].copy_(inputs[0] * 5);
    return write(outputs[0][0], inputs[0]);
  }
  WorkPointer recv(Tensors& tensors, int, int) override {
    return write(tensors[0], at::full_like(tensors[0], static_cast<double>(count + 1)));
  }
  WorkPointer send(Tensors&, int, int) override {
    ++count;
    return c10::make_intrusive<Done>();
  }

  int64_t count = 0;

 private:
  /// Without a change of the tensor's version, as networks write.
  WorkPointer write(const Tensor& to, const Tensor& from) {
    ++count;
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor(to).copy_(from);
    return c10::make_intrusive<Done>();
  }
};

struct LocalGroup {
  LocalGroup() {
    group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  }
  /// Exchanges the halves of a tensor.
  Tensor exchanged(const Tensor& x) const {
    Tensor input = x.contiguous(), output = at::empty_like(input);
    std::vector<int64_t> splits;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // of newer releases
    group->alltoall_base(output, input, splits, splits)->wait();
#pragma GCC diagnostic pop
    return output;
  }
  void reduce(const Tensor& x) const {
    Tensors tensors{x};
    group->allreduce(tensors)->wait();
  }

  c10::intrusive_ptr<LocalBackend> backend = c10::make_intrusive<LocalBackend>();
  c10::intrusive_ptr<c10d::ProcessGroup> group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
};

}  // namespace remat::testing
