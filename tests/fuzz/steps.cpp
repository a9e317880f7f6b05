// Runs a program's steps, and records their results.

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>

#include "tests/fuzz/budgets.h"
#include "tests/support/device_stats.h"

namespace fuzz {

namespace {

remat::MemoryMeter& meter() {
  static remat::MemoryMeter first;
  return first;
}

/// Returns the bytes of tensors on the CPU and on the programs' device.
int64_t live_bytes() {
  int64_t bytes = meter().live_bytes();
  if (!device().is_cpu()) bytes += remat::testing::device_bytes(device().index());
  return bytes;
}

/// Returns the bits, NaNs included. Two runs on a CPU with one thread do not differ by chance, so
/// all comparisons are bit by bit.
std::string bytes_of(const Tensor& t) {
  const Tensor dense = t.detach().resolve_conj().resolve_neg().contiguous().cpu();
  return std::string(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
}

/// Waits for an accelerator's engine thread, which may still be releasing a backward that has
/// returned.
template <class Condition>
void settle(const Condition& is_settled) {
  for (int i = 0; i < 1000 && !device().is_cpu() && !is_settled(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// [bytes] so few that regions drop out of a small cache.
constexpr int64_t small_cache_bytes = 600;

/// The guards that are alive while the steps run.
struct SharingGuards {
  explicit SharingGuards(Sharing sharing) {
    if (sharing == Sharing::Group) group.emplace();
    if (sharing == Sharing::Cache) cache.emplace();
    if (sharing == Sharing::SmallCache)
      cache.emplace(remat::RecomputeCacheOptions{.max_bytes = small_cache_bytes});
  }
  std::optional<remat::GraphExecGroup> group;
  std::optional<remat::RecomputeCacheGuard> cache;
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

void record_errors(Stage& stage, const std::function<void()>& body) {
  try {
    body();
  } catch (const remat::CheckpointError& error) {
    stage.error_type = "CheckpointError " + std::to_string(static_cast<int>(error.kind()));
    stage.error = error.what_without_backtrace();
  } catch (const c10::OutOfMemoryError& error) {
    stage.error_type = "out of memory";
    stage.error = error.what_without_backtrace();
  } catch (const c10::Error& error) {
    stage.error_type = "c10::Error";
    stage.error = first_line(error.what_without_backtrace());
  } catch (const FuseBlown&) {
    stage.error_type = "fuse";
  } catch (const std::exception& error) {
    stage.error_type = "std::exception";
    stage.error = error.what();
  }
  stage.raised = !stage.error_type.empty();
}

void Interpreter::record_tensor(Stage& stage, const std::string& label, const Tensor& tensor) {
  if (!tensor.defined()) {
    stage.entries.push_back({label, "undefined", ""});
    return;
  }
  // A view whose base was changed in place stops being a leaf at the first call for its node.
  try {
    tensor.grad_fn();
  } catch (const c10::Error&) {
  }
  std::ostringstream meta;
  meta << tensor.scalar_type() << " " << tensor.sizes() << " strides " << tensor.strides()
       << (tensor.requires_grad() ? " requires grad" : "") << (tensor.is_leaf() ? " leaf" : "")
       << " version " << tensor._version();
  stage.entries.push_back({label, meta.str(), bytes_of(tensor)});
}

void Interpreter::record_gradient(Stage& stage, const std::string& label, const Tensor& gradient) {
  record_tensor(stage, label, gradient);
  // The engine adds to a gradient in place or not, depending on its other holders.
  std::string& meta = stage.entries.back().meta;
  meta = meta.substr(0, meta.find(" version"));
}

void Interpreter::record_state(Stage& stage) {
  const int64_t calls = std::exchange(hook_calls_, 0);
  stage.changes = record_.changes;
  if (stage.raised) return;
  stage.entries.push_back(
      {"generator", "", bytes_of(at::globalContext().defaultGenerator(device()).get_state())});
  for (size_t i = 0; i < numbers_.size(); ++i) {
    stage.entries.push_back({"numbers", std::to_string(numbers_[i]->state()), ""});
    stage.entries.push_back({"own generator", "", bytes_of(generators_[i].get_state())});
  }
  for (size_t i = 0; i < leaves_.size(); ++i)
    record_tensor(stage, "leaf " + std::to_string(i), leaves_[i].tensor);
  record_modules(stage);
  for (const auto& [id, value] : values_)
    if (value.tensor.defined() && value.tensor.retains_grad())
      record_gradient(stage, "retained gradient", value.tensor.grad());
  // A recompute takes a gradient inside a region again, hooks included.
  if (!contents_.inner_grad)
    stage.entries.push_back({"calls of tensor hooks", std::to_string(calls), ""});
}

void Interpreter::change(const Step& step) {
  const Value& value = look_up(values_, step.target);
  const bool is_seen = value.origin->leaf || value.origin->as_argument || value.origin->as_capture;
  if (is_seen && mode_ == Mode::Unchanged) return;
  if (is_seen) record_.changes.may_raise = true;
  if (is_seen && !program_.all_values) record_.changes.unchecked = true;
  at::AutoGradMode mode(!(value.tensor.is_leaf() && value.tensor.requires_grad()) &&
                        step.salt % 2 == 0);
  if (value.tensor.is_floating_point()) value.tensor.mul_(1.25);
}

void Interpreter::differentiate(const Step& step, Stage& stage) {
  Tensors outputs, inputs, weights;
  for (const int id : step.outputs) {
    const Tensor& t = look_up(values_, id).tensor;
    if (!t.requires_grad() || !t.is_floating_point()) continue;
    outputs.push_back(t);
    weights.push_back(at::ones_like(t) * (1.0 + 0.5 * static_cast<double>(outputs.size())));
  }
  if (outputs.empty()) return;
  for (size_t i = 0; i < leaves_.size(); ++i) {
    if (program_.leaves[i].kind == LeafKind::Buffer) continue;
    bool is_wanted = step.inputs.empty();
    for (const int id : step.inputs) is_wanted |= id == static_cast<int>(i);
    if (is_wanted) inputs.push_back(leaves_[i].tensor);
  }
  const bool is_backward = step.kind == Step::Kind::Backward;
  std::optional<at::NoGradGuard> no_grad;
  if (step.in_no_grad) no_grad.emplace();
  std::unique_ptr<remat::SavedTensorHooksGuard> around;
  if (step.hooks) around = hooks(step.salt);
  for (int order = 1; order <= step.order; ++order) {
    const bool create = order < step.order;
    // Without `inputs`, leaves made by the program get gradients, too. With create_graph those
    // would refer to their own graph for ever.
    const Tensors only = step.inputs.empty() && step.order == 1 ? Tensors() : inputs;
    Tensors grads;
    if (is_backward) {
      torch::autograd::backward(outputs, weights, step.retain || create, create, only);
      for (const Tensor& leaf : inputs) grads.push_back(leaf.grad());
    } else {
      grads = torch::autograd::grad(outputs, inputs, weights, step.retain || create, create, true);
    }
    for (size_t i = 0; i < grads.size(); ++i) {
      record_gradient(stage, "order " + std::to_string(order) + " gradient " + std::to_string(i),
                      grads[i]);
    }
    outputs.clear();
    weights.clear();
    at::AutoGradMode with_grad(true);
    for (const Tensor& g : grads) {
      if (!g.defined() || !g.requires_grad()) continue;
      outputs.push_back((g * g).sum());
      weights.push_back(at::ones_like(outputs.back()));
    }
    if (outputs.empty()) return;
  }
}

void Interpreter::run_step(const Step& step) {
  Stage stage{.label = "step " + std::to_string(record_.stages.size() - 1)};
  const int64_t before = remat::counters().recomputed_bytes_alive;
  const bool is_checkpointed = mode_ == Mode::Checkpointed;
  auto body = [&] {
    std::optional<remat::MemoryLimitGuard> limit;
    if (is_checkpointed && step.out_of_memory >= 0)
      limit.emplace(meter().live_bytes() + step.out_of_memory);
    if (is_checkpointed) fuse_ = step.fuse;
    fuses_passed_ = 0;
    record_errors(stage, [&] {
      if (step.kind == Step::Kind::Again) {
        run_all(stage);
      } else if (step.kind == Step::Kind::Mutate) {
        change(step);
      } else if (step.kind == Step::Kind::Replace) {
        replace(step);
      } else {
        differentiate(step, stage);
      }
    });
    fuse_ = -1;
  };
  if (step.in_thread) {
    std::thread([&] { at::init_num_threads(), body(); }).join();
  } else {
    body();
  }
  for (Value& leaf : leaves_) {
    // Steps of programs that look at gradients leave them unchanged.
    if (step.order > 1 && !contents_.looks) leaf.tensor.mutable_grad() = Tensor();
  }
  record_state(stage);
  drop_retained_gradients();  // one run may fail where the other adds to them
  auto fault = [&](bool is_fault, const std::string& text) {
    if (is_fault && is_checkpointed) record_.faults.push_back("after " + stage.label + ": " + text);
  };
  const bool is_sharing = program_.sharing != Sharing::None;
  settle([&] { return is_sharing || remat::counters().recomputed_bytes_alive == before; });
  const int64_t alive = remat::counters().recomputed_bytes_alive;
  // In a thread a step shares nothing, but it may end a graph whose tensors the others hold.
  if (!is_sharing || step.in_thread)
    fault(is_sharing ? alive > before : alive != before, "recomputed bytes are still alive");
  if (program_.sharing == Sharing::SmallCache)
    fault(alive - bytes_before_steps_ > small_cache_bytes, "a cache holds more than it may");
  fault(observed_now_ != 0, "an observer was not told of a recompute's end");
  fault(scopes_alive_ != 0, "a scope of a context_fn is still entered");
  fault(!at::GradMode::is_enabled(), "grad mode is off");
  fault(remat::is_recomputing() || remat::is_checkpointing(), "a region is still active");
  record_.stages.push_back(std::move(stage));
}

void Interpreter::run_steps() {
  bytes_before_steps_ = remat::counters().recomputed_bytes_alive;
  {
    const SharingGuards guards(program_.sharing);
    for (const Step& step : program_.steps) {
      run_step(step);
      const Stage& stage = record_.stages.back();
      const bool is_planned = stage.error_type == "fuse" || step.out_of_memory >= 0;
      if (stage.raised && !is_planned) break;
    }
  }
  const auto has_nothing_left = [this] {
    return remat::counters().recomputed_bytes_alive == bytes_before_steps_;
  };
  settle(has_nothing_left);
  if (!has_nothing_left())
    record_.faults.push_back("after the steps: recomputed bytes are still alive");
}

int64_t& budget_bytes() {
  static int64_t bytes = 0;
  return bytes;
}

bool& budget_moves() {
  static bool moves = false;
  return moves;
}

Record run(const Program& program, Mode mode) {
  Record record;
  const remat::Counters before = remat::counters();
  const int64_t bytes = live_bytes();
  // A thread of its own: after a failed backward, the engine's queue keeps the remaining tasks and
  // their graph until the thread ends.
  std::thread([&] {
    at::init_num_threads();
    std::optional<remat::BudgetGuard> budget;
    if (const int64_t bytes = budget_bytes()) {
      remat::BudgetOptions options{.bytes = bytes, .device = device(), .min_bytes = 0};
      if (budget_moves())
        options.moving =
            remat::MoveOptions{.directory = device().is_cpu() || program.seed % 2 == 0
                                                ? std::filesystem::temp_directory_path()
                                                : std::filesystem::path(),
                               .min_bytes = 0};
      budget.emplace(std::move(options));
    }
    Interpreter interpreter(program, mode, record);
    interpreter.run_forward();
    record.held_bytes = live_bytes() - bytes;
    if (!record.stages.back().raised) interpreter.run_steps();
  }).join();
  settle([&before, bytes] {
    const remat::Counters now = remat::counters();
    return now.frames_alive == before.frames_alive &&
           now.recomputed_bytes_alive == before.recomputed_bytes_alive && live_bytes() <= bytes;
  });
  record.leaked_bytes = live_bytes() - bytes;
  const remat::Counters after = remat::counters();
  if (after.frames_alive != before.frames_alive)
    record.faults.push_back("at the end: frames are still alive");
  if (after.recomputed_bytes_alive != before.recomputed_bytes_alive)
    record.faults.push_back("at the end: recomputed bytes are still alive");
  return record;
}

}  // namespace fuzz
