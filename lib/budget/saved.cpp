#include "lib/budget/saved.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <utility>

#include "hooks/ready.h"
#include "lib/budget/rerun.h"
#include "lib/budget/runtime.h"
#include "lib/budget/storages.h"
#include "lib/budget/versions.h"
#include "lib/seam/plain_tensor.h"

namespace remat::budget {

void Saved::call_pack_hook(const at::Tensor& saved) {
  settle_versions();
  if (!saved.is_inference()) {
    counter_ = saved.unsafeGetTensorImpl()->version_counter();
    version_ = counter_.current_version();
    has_version_ = true;
  }
  if (is_plain(saved)) {
    Graph& graph = Graph::get();
    Dead dead;
    const std::lock_guard<std::mutex> lock(graph.mutex());
    Value* const value = graph.value_at(*storage_of(saved), dead);
    if (value != nullptr && !value->is_source() && !value->is_blank() && !value->has_changed()) {
      geometry_ = Geometry(saved);
      geometry_.value = value;
      graph.own(*value);
      clock_ = runtime_->cursor = runtime_->clock;
      value->saves.push_back(clock_);
      value->runtime->note_save();
      value->runtime->hold(*value, saved.storage());
      value->cost = -1;
      value->is_rerun = false;
      return;
    }
  }
  kept_ = seam::alias_without_history(saved);
}

HeldInfo Saved::describe() const {
  const bool is_value = geometry_.value != nullptr;
  HeldInfo info;
  info.sizes = is_value ? std::vector<int64_t>(geometry_.sizes.begin(), geometry_.sizes.end())
                        : kept_.sizes().vec();
  info.dtype = is_value ? geometry_.dtype.toScalarType() : kept_.scalar_type();
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  info.dropped = is_value && !Graph::has_content(*geometry_.value);
  if (is_value && !info.dropped) info.bytes = geometry_.value->bytes;
  return info;
}

// The text is LibTorch's, without the name of the node, which hooks do not see.
void Saved::check_version() const {
  if (!has_version_ || counter_.current_version() == version_) return;
  const at::Tensor none;
  TORCH_CHECK(
      false,
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: [",
      geometry_.value != nullptr
          ? c10::str(geometry_.on(c10::Storage::create_legacy(c10::kCPU)).toString(), " ",
                     c10::IntArrayRef(geometry_.sizes))
          : c10::str(kept_.toString(), " ", kept_.sizes()),
      "] is at version ", counter_.current_version(), "; expected version ", version_, " instead.",
      torch::autograd::AnomalyMode::is_enabled()
          ? " Hint: the backtrace further above shows the operation that failed to compute its gradient. The "
            "variable in question was changed in there or anywhere later. Good luck!"
          : " Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True, check_nan=False).");
}

at::Tensor Saved::call_unpack_hook() {
  if (Inspection* const inspection = Inspection::current()) return inspection->note(describe());
  check_version();
  if (geometry_.value == nullptr) return kept_;
  c10::Storage content = content_again(*geometry_.value, *runtime_, clock_);
  wait_before_use(content);
  return geometry_.on(std::move(content));
}

// The content of an accelerator was made on the budget's own stream.
void Saved::wait_before_use(const c10::Storage& content) const {
  if (content.device().is_cpu()) return;
  c10::SmallVector<c10::Stream, 1> streams;
  {
    const std::lock_guard<std::mutex> lock(Graph::get().mutex());
    streams = runtime_->own_streams();
  }
  for (const c10::Stream& own : streams) {
    if (own.device() != content.device() || own == current_stream(own.device())) continue;
    Ready ready(own);
    ready.record();
    ready.wait_before_use(content);
  }
}

Saved::~Saved() {
  if (geometry_.value == nullptr) return;
  Dead dead;
  Graph& graph = Graph::get();
  const std::lock_guard<std::mutex> lock(graph.mutex());
  Value& value = *geometry_.value;
  auto* const save = std::find(value.saves.begin(), value.saves.end(), clock_);
  value.saves.erase(save);
  value.cost = -1;
  value.runtime->drop_if_unneeded(value, dead);
  const std::shared_ptr<Runtime> runtime = value.runtime;
  graph.disown(value, dead);
  runtime->note_end_of_save(dead);
}

void Saved::refuse_tracing() const {
  TORCH_CHECK(Inspection::current() != nullptr,
              "remat::BudgetGuard: compiled autograd cannot trace what a budget keeps. Do: run "
              "backward without it.");
}

}  // namespace remat::budget
