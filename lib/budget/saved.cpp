#include "lib/budget/saved.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <utility>

#include "lib/budget/rerun.h"
#include "lib/budget/runtime.h"
#include "lib/budget/storages.h"
#include "lib/budget/versions.h"
#include "lib/seam/plain_tensor.h"
#include "lib/seam/ready.h"

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
    Value* value = graph.value_at(*storage_of(saved), dead);
    const bool is_source = value == nullptr || value->is_source();
    if (is_source) value = runtime_->source_to_move(saved, dead);
    if (value != nullptr && !value->is_blank() && (is_source || value->is_content_of(saved))) {
      geometry_ = Geometry(saved);
      value->own();
      save_ = {value, runtime_->clock};
      has_value_ = true;
      runtime_->cursor = save_.clock;
      value->saves.push_back(&save_);
      value->runtime->note_save();
      if (!is_source) value->runtime->hold(*value, saved.storage());
      value->look.cost = -1;
      value->is_rerun = false;
      return;
    }
  }
  kept_ = seam::alias_without_history(saved);
}

HeldInfo Saved::describe() const {
  HeldInfo info;
  info.sizes = has_value_ ? std::vector<int64_t>(geometry_.sizes.begin(), geometry_.sizes.end())
                          : kept_.sizes().vec();
  info.dtype = has_value_ ? geometry_.dtype.toScalarType() : kept_.scalar_type();
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  if (has_value_) {
    info.dropped = !save_.value->has_content();
    info.bytes = save_.value->bytes;
    info.owner = save_.value;
  } else if (kept_.has_storage()) {
    info.owner = storage_of(kept_);
    info.bytes = static_cast<int64_t>(storage_of(kept_)->nbytes());
  }
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
      has_value_ ? c10::str(geometry_.on(c10::Storage::create_legacy(c10::kCPU)).toString(), " ",
                            c10::IntArrayRef(geometry_.sizes))
                 : c10::str(kept_.toString(), " ", kept_.sizes()),
      "] is at version ", counter_.current_version(), "; expected version ", version_, " instead.",
      torch::autograd::AnomalyMode::is_enabled()
          ? " Hint: the backtrace further above shows the operation that failed to compute its "
            "gradient. The variable in question was changed in there or anywhere later. Good "
            "luck!"
          : " Hint: enable anomaly detection to find the operation that failed to compute its "
            "gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False).");
}

at::Tensor Saved::call_unpack_hook() {
  if (Inspection* const inspection = Inspection::current()) return inspection->note(describe());
  check_version();
  if (!has_value_) return kept_;
  c10::Storage content = content_again(save_, *runtime_);
  wait_before_use(content);
  at::Tensor tensor = geometry_.on(std::move(content));
  // As without a budget, the tensor has the saved one's counter, which shows writes in backward.
  if (has_version_) tensor.unsafeGetTensorImpl()->set_version_counter(counter_);
  const std::lock_guard<std::mutex> lock(Graph::get().mutex());
  Value& value = *save_.value;
  if (has_version_ && !value.counter.enabled()) {
    value.counter = counter_;
    value.version = version_;
  }
  return tensor;
}

// Contents on an accelerator are made on the budget's own stream.
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
  if (!has_value_) return;
  Dead dead;
  Graph& graph = Graph::get();
  const std::lock_guard<std::mutex> lock(graph.mutex());
  Value& value = *save_.value;
  value.saves.erase(std::find(value.saves.begin(), value.saves.end(), &save_));
  value.look.cost = -1;
  value.runtime->drop_if_unneeded(value, dead);
  const std::shared_ptr<Runtime> runtime = value.runtime;
  graph.disown(value, dead);
  runtime->note_end_of_save(dead);
}

void Saved::refuse_tracing() const {
  TORCH_CHECK(Inspection::current() != nullptr,
              "remat::BudgetGuard: compiled autograd cannot trace tensors that were saved under "
              "a budget. Hint: run backward without compiled autograd.");
}

}  // namespace remat::budget
