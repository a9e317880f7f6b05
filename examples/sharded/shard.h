#pragma once
// The parameters of one block, of which each process of a group owns an equal part.

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>

#include "../processes/accumulation.h"
#include "../processes/group.h"

// The bytes of gathered parameters that are alive in this process.
struct Gathered {
  int64_t bytes = 0, peak_bytes = 0;

  void add(int64_t more) {
    bytes += more;
    peak_bytes = std::max(peak_bytes, bytes);
  }
};

// `whole()` is all parameters in one dimension. It has memory only between `gather()` and `free()`,
// and so have saved tensors that share its storage. When backward has completed its
// gradient, the processes average it, this process's part of it becomes the gradient of `part()`,
// and the memory is freed.
//
// Gathering restores the leaf's former values, so for autograd, and for remat's check of captured
// parameters, nothing may change. Writes therefore go through `variable_data()`, which has a
// version counter of its own.
class Shard {
 public:
  // `initial`: (P), the same in every process.
  Shard(const torch::Tensor& initial, const Place& place, const Group& group, Gathered& gathered)
      : num_parameters_(initial.numel()),
        size_(place.size),
        backend_(group.backend),
        gathered_(gathered),
        part_(part_of(initial, place).requires_grad_()),
        padded_(torch::empty({part_.numel() * place.size}, initial.options()).requires_grad_()),
        accumulation_(padded_, [this] { reduce(); }) {
    resize(0);
  }
  Shard& operator=(Shard&&) = delete;  // the hook refers to it

  torch::Tensor& part() { return part_; }
  torch::Tensor whole() const {
    if (padded_.numel() == num_parameters_) return padded_;
    return padded_.narrow(0, 0, num_parameters_);
  }

  // Gathers the parameters. Waits for the other processes, which gather the same block.
  void gather() {
    resize(part_.nbytes() * size_);
    torch::Tensor all = padded_.variable_data(), mine = part_.variable_data();
    backend_->_allgather_base(all, mine)->wait();
  }

  void free() { resize(0); }

 private:
  // Returns a part of the parameters, padded with zeros so that all parts are equally long.
  static torch::Tensor part_of(const torch::Tensor& initial, const Place& place) {
    const int64_t length = (initial.numel() + place.size - 1) / place.size;
    torch::Tensor padded = torch::zeros({length * place.size}, initial.options());
    padded.narrow(0, 0, initial.numel()).copy_(initial);
    return padded.narrow(0, length * place.rank, length).clone();
  }

  void reduce() {
    torch::Tensor gradient = padded_.grad();
    padded_.mutable_grad().reset();
    // All nodes that read the parameters have run, since each contributes to this gradient.
    free();
    if (!part_.grad().defined()) part_.mutable_grad() = torch::empty_like(part_.variable_data());
    torch::Tensor mine = part_.mutable_grad();
    backend_->_reduce_scatter_base(mine, gradient)->wait();
    mine.div_(size_);
  }

  // The storage stays the same object, since tensors that autograd keeps refer to it.
  void resize(size_t bytes) {
    const torch::Storage& storage = padded_.storage();
    gathered_.add(static_cast<int64_t>(bytes) - static_cast<int64_t>(held_bytes_));
    held_bytes_ = bytes;
    storage.set_data_ptr_noswap(storage.allocator()->allocate(bytes));
    storage.set_nbytes(bytes);
  }

  int64_t num_parameters_;
  int size_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  Gathered& gathered_;
  torch::Tensor part_, padded_;
  Accumulation accumulation_;
  size_t held_bytes_ = 0;
};
