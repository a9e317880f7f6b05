// Runs one cell of the table, plainly or checkpointed, and records its results.

#include "tests/table/run.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <mutex>
#include <optional>
#include <sstream>

#include "remat/memory.h"
#include "remat/report.h"
#include "remat/scope.h"
#include "tests/table/surroundings.h"

namespace table {

namespace {

std::mutex faults_mutex;
std::vector<std::string> reported_faults;

std::vector<std::string> take_faults() {
  std::lock_guard<std::mutex> lock(faults_mutex);
  return std::exchange(reported_faults, {});
}

std::string bytes_of(const Tensor& tensor) {
  const Tensor plain = tensor.resolve_conj().resolve_neg().contiguous();
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

std::string meta_of(const Tensor& t) {
  std::ostringstream text;
  text << t.scalar_type() << t.sizes() << " " << t.layout();
  if (t.layout() == at::kStrided)
    text << " strides " << t.strides() << " offset " << t.storage_offset();
  if (t.is_conj()) text << " conj";
  if (t.is_neg()) text << " neg";
  if (t._is_zerotensor()) text << " zerotensor";
  if (t.is_leaf()) text << " leaf";
  if (t.requires_grad()) text << " requires grad";
  if (t.is_view()) text << " view";
  return text.str();
}

void append(std::vector<Entry>& entries, const std::string& label, const Tensor& tensor) {
  at::NoGradGuard no_grad;
  if (!tensor.defined()) {
    entries.push_back({label, "undefined", ""});
  } else if (tensor.layout() == at::kSparse) {
    entries.push_back({label, meta_of(tensor), ""});
    const Tensor flat = tensor.detach().coalesce();
    append(entries, label + " indices", flat.indices());
    append(entries, label + " values", flat.values());
  } else if (tensor._is_zerotensor() || tensor.layout() != at::kStrided) {
    entries.push_back({label, meta_of(tensor), ""});
  } else {
    entries.push_back({label, meta_of(tensor), bytes_of(tensor.detach())});
  }
}

/// Describes the state that leftover guards would have changed.
std::string ambient_state() {
  std::ostringstream text;
  text << at::GradMode::is_enabled() << at::SavedTensorDefaultHooks::is_enabled()
       << at::SavedTensorDefaultHooks::get_tls_state().stack.size()
       << at::autocast::is_autocast_enabled(at::kCPU)
       << static_cast<int>(remat::current_phase().phase) << remat::is_recomputing();
  return text.str();
}

/// Drops the nodes that LibTorch's queue holds after an error in backward, until the next backward.
void drop_ready_nodes() {
  const Tensor x = at::ones({}).requires_grad_();
  torch::autograd::grad({x * 2}, {x});
}

std::string text_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

}  // namespace

void report_fault(std::string what) {
  std::lock_guard<std::mutex> lock(faults_mutex);
  reported_faults.push_back(std::move(what));
}

Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype) {
  return constant(sizes, dtype).requires_grad_();
}

Tensor constant(at::IntArrayRef sizes, at::ScalarType dtype) { return at::randn(sizes, dtype); }

Tensor whole(at::IntArrayRef sizes, int64_t n) { return at::randint(n, sizes, at::kLong); }

Tensor weights_of(const Tensor& output) {
  at::NoGradGuard no_grad;
  const at::ScalarType real = c10::toRealValueType(output.scalar_type());
  const Tensor steps = at::arange(output.numel(), at::kDouble).mul(0.37).add(0.2).cos().add(0.3);
  return steps.to(real).to(output.scalar_type()).reshape(output.sizes());
}

Tensors differentiable(const Tensors& tensors) {
  Tensors found;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.requires_grad()) found.push_back(tensor);
  return found;
}

Tensors grad(const Tensors& outputs, const Tensors& inputs, bool retains, bool creates) {
  if (outputs.empty() || inputs.empty()) return {};
  Tensors weights;
  for (const Tensor& output : outputs) weights.push_back(weights_of(output));
  return torch::autograd::grad(outputs, inputs, weights, retains, creates, /*allow_unused=*/true);
}

Run::Run(const Cell& cell, Way way, Record& record) : record_(record) {
  at::manual_seed(cell.seed);
  made_ = cell.function.make();
  if (way == Way::Copying)  // in the body, since guards belong to their thread
    made_.body = [body = made_.body](const Tensors& args) {
      const auto hooks = hooks_that_clone();
      return body(args);
    };
  if (cell.mode.wrap) made_.body = cell.mode.wrap(made_.body);
  inputs_ = differentiable(made_.args);
  for (const Tensor& param : made_.params)
    if (param.requires_grad()) inputs_.push_back(param);
  step("forward", [&] { forward(cell, way); });
}

Run::~Run() {
  for (Tensor& input : inputs_) input.mutable_grad() = Tensor();  // no cycle of graph and gradient
}

void Run::forward(const Cell& cell, Way way) {
  const Configuration& configuration = cell.configuration;
  args_ = made_.prepare ? made_.prepare(made_.args) : made_.args;
  versions_before_ = versions();
  Tensors results;
  if (way == Way::Checkpointed) {
    if (configuration.during) during_ = configuration.during(cell.seed);
    results = configuration.checkpointed(made_.body, args_);
  } else {
    const remat::DisableCheckpointGuard plainly;
    results = configuration.plain ? configuration.plain(made_.body, args_) : made_.body(args_);
  }
  note("result", results);
  outputs_ = differentiable(results);
  // Plain autograd saved the object itself, which now has new data: that gradient belongs to
  // neither.
  const bool is_spared = way != Way::Checkpointed && (cell.function.traits & replaces_data) != 0;
  if (made_.after && !is_spared) made_.after(args_);
}

Tensors Run::release_graph() {
  args_.clear();
  return std::exchange(outputs_, {});
}

std::vector<uint32_t> Run::versions() const {
  std::vector<uint32_t> all;
  for (const Tensors* tensors : {&args_, &made_.params, &made_.buffers})
    for (const Tensor& tensor : *tensors)
      all.push_back(tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version()));
  return all;
}

void Run::note_state() {
  note("buffer", made_.buffers);
  note("default generator", at::detail::getDefaultCPUGenerator().get_state());
  std::ostringstream steps;
  const std::vector<uint32_t> now = versions();
  for (std::size_t i = 0; i < now.size() && i < versions_before_.size(); ++i)
    steps << " " << now[i] - versions_before_[i];
  if (!args_.empty() || made_.args.empty())
    record_.stages.back().entries.push_back({"versions", steps.str(), ""});
  record_.stages.back().entries.push_back({"ambient state", ambient_state(), ""});
}

void Run::step(const std::string& label, const std::function<void()>& part) {
  if (!record_.stages.empty() && record_.stages.back().raised) return;
  record_.stages.push_back({label});
  try {
    part();
    note_state();
  } catch (const std::exception& error) {
    record_.stages.back().raised = true;
    record_.stages.back().error = text_of(error);
  }
}

void Run::note(const std::string& label, const Tensor& tensor) {
  append(record_.stages.back().entries, label, tensor);
}

void Run::note(const std::string& label, const Tensors& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    note(label + " " + std::to_string(i), tensors[i]);
}

Record record_of(const Cell& cell, Run::Way way) {
  static const remat::MemoryMeter meter;
  Record record;
  const int64_t bytes_before = meter.live_bytes();
  const remat::Counters before = remat::counters();
  const std::string ambient_before = ambient_state();
  {
    Run run(cell, way, record);
    cell.mode.drive(run);
  }
  drop_ready_nodes();
  record.leaked_bytes = meter.live_bytes() - bytes_before;
  record.faults = take_faults();
  const remat::Counters after = remat::counters();
  auto expect = [&record](int64_t was, int64_t is, const char* what) {
    if (was != is)
      record.faults.push_back(std::to_string(is - was) + " more " + what + " than before");
  };
  expect(before.frames_alive, after.frames_alive, "frames alive");
  expect(before.recomputed_bytes_alive, after.recomputed_bytes_alive, "recomputed bytes alive");
  const bool opened = after.frames_created != before.frames_created;
  const Configuration& configuration = cell.configuration;
  if (way == Run::Way::Checkpointed && !configuration.leaves_frames &&
      opened != configuration.opens_frames)
    record.faults.push_back(opened ? "a region was opened" : "no region was opened");
  if (ambient_state() != ambient_before)
    record.faults.push_back("ambient state " + ambient_before + " became " + ambient_state());
  return record;
}

}  // namespace table
