#pragma once
// One run of a cell, plain or checkpointed, and the record that it leaves to be compared.

#include <functional>
#include <string>
#include <vector>

#include "tests/table/table.h"

namespace table {

/// One thing that a run left: equal entries have equal fields.
struct Entry {
  std::string label, meta, bytes;
  bool operator==(const Entry&) const = default;
};

/// Forward, or one step of what the mode does after it.
struct Stage {
  std::string label;
  std::vector<Entry> entries{};
  bool raised = false;
  std::string error{};  ///< all of its text but LibTorch's backtrace
};

struct Record {
  std::vector<Stage> stages{};
  std::vector<std::string> faults{};  ///< what was there afterwards and not before
  int64_t leaked_bytes = 0;
};

class Run {
 public:
  enum class Way {
    Plain,
    Copying,  ///< plain, with copies of what autograd saves: no change in place is refused
    Checkpointed
  };

  Run(const Cell& cell, Way way, Record& record);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Leaves that require grad: arguments, then parameters.
  const Tensors& inputs() const { return inputs_; }
  /// Results that require grad.
  const Tensors& outputs() const { return outputs_; }
  /// Lets go of the graph and hands it out.
  Tensors release_graph();
  /// Does a part of what the mode does, and records its error and what it `note`s; after an error
  /// nothing more is done.
  void step(const std::string& label, const std::function<void()>& part);
  void note(const std::string& label, const Tensor& tensor);
  void note(const std::string& label, const Tensors& tensors);

 private:
  void forward(const Cell& cell, Way way);
  void note_state();
  std::vector<uint32_t> versions() const;

  Made made_;
  std::shared_ptr<void> during_;
  Tensors args_, inputs_, outputs_;
  std::vector<uint32_t> versions_before_;
  Record& record_;
};

/// The record of a cell; nothing of the run is left when it returns, unless it says so.
Record record_of(const Cell& cell, Run::Way way);

/// Outer gradients that differ from element to element.
Tensor weights_of(const Tensor& output);
/// torch::autograd::grad with `weights_of` the outputs; undefined for what is not used.
Tensors grad(const Tensors& outputs, const Tensors& inputs, bool retains, bool creates);
/// Those that a gradient can be taken of.
Tensors differentiable(const Tensors& tensors);

}  // namespace table
