#pragma once
// A module whose forward reads and writes buffers, in the ways that are common in modules.

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace remat::testing {

/// The use of its buffers in forward.
enum class State {
  Counter,    ///< counts calls
  Mean,       ///< moves an exponential mean
  Peak,       ///< keeps a maximum: some writes change nothing
  Queue,      ///< writes to the next place of a ring
  Halves,     ///< writes through another buffer in the same storage
  Replaced,   ///< lets a buffer grow, by resize_, set_data or set_
  Norm,       ///< moves the statistics of a batch norm
  Table,      ///< fills a table when it needs more of it, and keeps its size in a plain member
  Added,      ///< registers a buffer in the first call
  Constants,  ///< only reads, buffers of several layouts
  Count
};

inline const char* name_of(State state) {
  static constexpr const char* names[] = {"counter",  "mean", "peak",  "queue", "halves",
                                          "replaced", "norm", "table", "added", "constants"};
  return names[static_cast<int>(state)];
}

/// Returns whether each call writes to buffers that recomputes compare.
inline bool writes_each_time(State state) { return state < State::Norm; }

class StatefulImpl : public torch::nn::Module {
 public:
  /// Bytes of the constants that a region may not copy.
  static constexpr int64_t constant_bytes = 400'000;

  /// `salt` decides details: layouts, data types, whether forward reads before it writes.
  StatefulImpl(const std::vector<State>& states, uint64_t salt, at::Tensor weight,
               at::Device device = at::kCPU)
      : weight_(register_parameter("weight", std::move(weight))), device_(device) {
    for (const State state : states) {
      parts_.push_back({state, std::to_string(parts_.size()) + name_of(state), salt});
      salt = (salt ^ (salt >> 31)) * 0x9e3779b97f4a7c15ULL + 1;
      make(parts_.back());
    }
  }

  /// Sets a module to be called by `call` behind the module's own parts.
  void set_inner(const std::string& name, const std::shared_ptr<torch::nn::Module>& module,
                 std::function<at::Tensor(const at::Tensor&)> call) {
    register_module(name, module);
    inner_ = std::move(call);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x.is_floating_point() ? x : x.to(at::kFloat);
    y = y * (1 + weight_.mean().to(y.scalar_type()).tanh());
    for (Part& part : parts_) y = run(part, y);
    return inner_ ? inner_(y) : y;
  }

  /// Returns buffers that forward only reads, with the memory that they had at construction.
  const std::vector<std::pair<at::Tensor, const void*>>& constants() const { return constants_; }

 private:
  static constexpr int64_t width = 4;

  struct Part {
    State state;
    std::string name;
    uint64_t salt = 0;
    at::Tensor buffer{}, other{};
    int64_t filled = 0;  // the plain member
    torch::nn::BatchNorm1d norm = nullptr;
    uint64_t bits(int from, uint64_t n) const { return (salt >> from) % n; }
  };

  at::TensorOptions options(const Part& part) const {
    return at::TensorOptions(device_).dtype(part.bits(8, 2) == 0 ? at::kDouble : at::kFloat);
  }

  /// Returns zeros in memory of LibTorch, with gaps, or in memory of the program.
  at::Tensor zeros(const Part& part, int64_t size) const {
    const uint64_t layout = part.bits(12, 4);
    if (layout == 2) return at::zeros({2 * size}, options(part)).slice(0, 0, 2 * size, 2);
    if (layout != 3 || !device_.is_cpu()) return at::zeros({size}, options(part));
    return foreign(size, options(part));
  }

  static at::Tensor foreign(int64_t size, const at::TensorOptions& options) {
    const auto memory = std::make_shared<std::vector<double>>(size, 0.0);
    return at::from_blob(memory->data(), {size}, [memory](void*) {}, options);
  }

  void make(Part& p) {
    const auto add = [&](const char* name, const at::Tensor& tensor) {
      return register_buffer(p.name + name, tensor);
    };
    const auto add_constant = [&](const char* name, const at::Tensor& tensor) {
      const bool has_memory = tensor.layout() == at::kStrided && !tensor.is_meta();
      constants_.emplace_back(add(name, tensor), has_memory ? tensor.const_data_ptr() : nullptr);
    };
    switch (p.state) {
      case State::Counter:
        p.buffer = add("", at::zeros({}, at::TensorOptions(device_).dtype(at::kLong)));
        break;
      case State::Queue:
        p.other = add("_next", at::zeros({}, at::TensorOptions(device_).dtype(at::kLong)));
        p.buffer = add("", zeros(p, width));
        break;
      case State::Halves: {
        const at::Tensor both = zeros(p, 2 * width);
        p.other = add("_half", both.narrow(0, width / 2, width));
        p.buffer = add("", both);
        break;
      }
      case State::Replaced:
        p.buffer = add("", at::empty({0}, options(p)));
        break;
      case State::Norm:
        p.norm = register_module(
            p.name, torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(3).affine(false)));
        p.norm->to(device_, at::kDouble);
        p.norm->train(p.bits(20, 4) != 0);
        break;
      case State::Added:
        break;
      case State::Constants:
        if (device_.is_cpu() && p.bits(20, 2) == 0)
          p.buffer = foreign(constant_bytes / 8, at::TensorOptions(at::kDouble));
        else
          p.buffer = at::zeros({constant_bytes / 8}, at::TensorOptions(device_).dtype(at::kDouble));
        p.buffer.narrow(0, 0, width).fill_(0.5);
        add_constant("_dense", p.buffer);
        add_constant("_half", p.buffer.narrow(0, 0, width));
        add_constant("_expanded", at::ones({1}, options(p)).expand({width}));
        add_constant("_meta", at::empty({width}, at::TensorOptions(at::kMeta)));
        if (!device_.is_cpu()) break;
        p.other = at::eye(width).to_sparse();
        add_constant("_sparse", p.other);
        add_constant("_csr", at::eye(width).to_sparse_csr());
        break;
      default:
        p.buffer = add("", zeros(p, width));
    }
  }

  /// Returns a factor from the buffer's values. No node saves the buffer itself, which later calls
  /// change.
  static at::Tensor read(const Part& p) {
    const at::Tensor& from = p.state == State::Halves && p.bits(20, 2) == 0 ? p.other : p.buffer;
    return 1 + 0.25 * from.clone().to(at::kDouble).sum().tanh();
  }

  at::Tensor run(Part& p, const at::Tensor& x) {
    if (p.state == State::Norm) return run_norm(p, x);
    if (p.state == State::Table) return run_table(p, x);
    if (p.state == State::Added || p.state == State::Constants) return run_constants(p, x);
    const uint64_t reads = p.bits(16, 3);  // first, last, or both
    at::Tensor y = x;
    if (reads != 1) y = (y * read(p).to(y.scalar_type())).sin();
    write(p, y);
    if (reads != 0) y = y.sin() * read(p).to(y.scalar_type());
    return y;
  }

  void write(Part& p, const at::Tensor& y) {
    const at::NoGradGuard no_grad;
    const at::Tensor sum = y.detach().to(at::kDouble).sum().tanh();
    const at::Tensor row =
        (sum * at::linspace(0.5, 2, width, sum.options())).to(p.buffer.scalar_type());
    switch (p.state) {
      case State::Counter:
        if (p.bits(20, 4) == 0)
          p.buffer.data().add_(1);  // without a change of the version
        else
          p.buffer.add_(1);
        break;
      case State::Mean:
        if (p.bits(20, 2) == 0)
          p.buffer.lerp_(row, 0.5);
        else
          p.buffer.mul_(0.5).add_(row);
        break;
      case State::Peak:
        p.buffer.copy_(at::maximum(p.buffer, row));
        break;
      case State::Queue:
        p.buffer.narrow(0, p.other.item<int64_t>(), 1).copy_(row.narrow(0, 0, 1));
        p.other.add_(1).remainder_(width);
        break;
      case State::Halves:
        (p.bits(21, 2) == 0 ? p.other : p.buffer.narrow(0, 0, width)).add_(row);
        break;
      default:
        replace(p, at::cat({p.buffer, row.narrow(0, 0, 2)}));
    }
  }

  static void replace(Part& p, const at::Tensor& longer) {
    const at::Tensor now = longer.slice(0, std::max<int64_t>(longer.numel() - 6, 0)).clone();
    switch (p.bits(20, 4)) {
      case 0:
        p.buffer.resize_({now.numel()}).copy_(now);
        return;
      case 1:
        p.buffer.data().resize_({0});
        p.buffer.resize_({now.numel()}).copy_(now);
        return;
      case 2:
        p.buffer.set_data(now);
        return;
      default:
        p.buffer.set_(now);
    }
  }

  static at::Tensor run_norm(Part& p, const at::Tensor& x) {
    const at::Tensor numbers = at::cat({x.reshape(-1).to(at::kDouble).sin().mean().reshape({1}),
                                        at::arange(5, x.options().dtype(at::kDouble))});
    return x * p.norm->forward(numbers.reshape({2, 3})).pow(2).mean().add(0.5).to(x.scalar_type());
  }

  static at::Tensor run_table(Part& p, const at::Tensor& x) {
    // A node may save the table itself if the first call fills it for good.
    const bool grows = p.bits(20, 2) == 0;
    const int64_t wanted = grows ? std::clamp<int64_t>(x.numel(), 1, width) : width;
    if (wanted > p.filled) {
      const at::NoGradGuard no_grad;
      p.filled = wanted;
      p.buffer.narrow(0, 0, wanted).copy_(at::arange(1, wanted + 1));
    }
    const at::Tensor last = p.buffer.select(0, wanted - 1);
    return x.sin() * (grows ? last.clone() : last).to(x.scalar_type());
  }

  at::Tensor run_constants(Part& p, const at::Tensor& x) {
    if (!p.buffer.defined()) {
      const at::NoGradGuard no_grad;
      p.buffer = register_buffer(p.name, x.detach().to(at::kDouble).sum().tanh().reshape({1}));
    }
    at::Tensor y = x.sin() * p.buffer.select(0, 0).to(x.scalar_type());
    if (p.other.defined()) y = y * p.other.to_dense().to(y.scalar_type()).sum();
    return y;
  }

  at::Tensor weight_;
  const at::Device device_;
  std::vector<Part> parts_;
  std::vector<std::pair<at::Tensor, const void*>> constants_;
  std::function<at::Tensor(const at::Tensor&)> inner_;
};

}  // namespace remat::testing
