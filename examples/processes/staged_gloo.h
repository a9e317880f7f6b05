#pragma once
// Gloo for the tensors of a device, by way of the host: a LibTorch may have Gloo for the CPU only.

#include <torch/torch.h>

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <utility>
#include <vector>

// Each call copies to the host, waits for Gloo, and copies back on the current stream.
class StagedGloo final : public c10d::Backend {
  using Tensors = std::vector<torch::Tensor>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

 public:
  explicit StagedGloo(c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "gloo over the host"; }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors near = near_of(tensors);
    gloo_->broadcast(near, options)->wait();
    return done(tensors, near);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors near = near_of(tensors);
    gloo_->allreduce(near, options)->wait();
    return done(tensors, near);
  }
  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override {
    Tensors near_inputs = near_of(inputs);
    std::vector<Tensors> near;
    for (const Tensors& each : outputs) near.push_back(near_of(each));
    gloo_->allgather(near, near_inputs, options)->wait();
    WorkPointer work;
    for (size_t i = 0; i < outputs.size(); ++i) work = done(outputs[i], near[i]);
    return work;
  }
  WorkPointer _allgather_base(torch::Tensor& output, torch::Tensor& input,
                              const c10d::AllgatherOptions& options) override {
    torch::Tensor near = output.cpu(), near_input = input.cpu();
    gloo_->_allgather_base(near, near_input, options)->wait();
    return done({output}, {near});
  }
  WorkPointer _reduce_scatter_base(torch::Tensor& output, torch::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    torch::Tensor near = output.cpu(), near_input = input.cpu();
    gloo_->_reduce_scatter_base(near, near_input, options)->wait();
    return done({output}, {near});
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  static Tensors near_of(const Tensors& tensors) {
    Tensors near;
    for (const torch::Tensor& each : tensors) near.push_back(each.cpu());
    return near;
  }
  static WorkPointer done(Tensors tensors, const Tensors& near) {
    std::vector<c10::Device> devices;
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].copy_(near[i]);
      devices.push_back(tensors[i].device());
    }
    auto result = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices);
    result->markCompleted(c10::IValue(tensors));
    return c10d::Work::create_from_future(result);
  }

  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;
};
