#pragma once
// One run of a cell, plain or checkpointed, and its record for comparison.

#include <functional>
#include <string>
#include <vector>

#include "tests/table/table.h"

namespace table {

/// One result of a run. Equal entries have equal fields.
struct Entry {
  std::string label, meta, bytes;
  bool operator==(const Entry&) const = default;
};

/// Forward, or one step of the mode after it.
struct Stage {
  std::string label;
  std::vector<Entry> entries{};
  bool raised = false;
  std::string error{};  ///< the whole text but LibTorch's backtrace
};

struct Record {
  std::vector<Stage> stages{};
  std::vector<std::string> faults{};  ///< leftovers that were not there before the run
  int64_t leaked_bytes = 0;
};

class Run {
 public:
  enum class Way {
    Plain,
    Copying,  ///< plain, with copies of saved tensors: no change in place is refused
    Checkpointed
  };

  Run(const Cell& cell, Way way, Record& record);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// Returns leaves that require grad: arguments, then parameters.
  const Tensors& inputs() const { return inputs_; }
  /// Returns results that require grad.
  const Tensors& outputs() const { return outputs_; }
  /// Releases the graph and returns its tensors.
  Tensors release_graph();
  /// Runs a part of the mode, and records its error and the tensors that it `note`s. After an error
  /// it runs no further parts.
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

/// Returns the record of a cell. Nothing of the run is left afterwards, or the record says so.
Record record_of(const Cell& cell, Run::Way way);

/// Returns outer gradients that differ from element to element.
Tensor weights_of(const Tensor& output);
/// Returns torch::autograd::grad with `weights_of` the outputs; undefined for unused inputs.
Tensors grad(const Tensors& outputs, const Tensors& inputs, bool retains, bool creates);
/// Returns the tensors that can have a gradient.
Tensors differentiable(const Tensors& tensors);

}  // namespace table
