#include "lib/run.h"

#include <torch/csrc/autograd/variable.h>

#include <map>
#include <utility>

#include "lib/counters.h"

namespace remat {

namespace {

using References = std::map<c10::TensorImpl*, std::size_t>;

/// A view refers to its base.
void add_bases(References& references) {
  for (const auto& [impl, count] : References(references)) {
    const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(impl->autograd_meta());
    if (meta == nullptr || !meta->is_view_) continue;
    const auto* view = static_cast<const torch::autograd::DifferentiableViewMeta*>(meta);
    if (view->has_bw_view()) ++references[view->get_backward_view().base_.unsafeGetTensorImpl()];
    if (view->has_fw_view() && !view->shared_view_info())
      ++references[view->get_forward_view().base_.unsafeGetTensorImpl()];
  }
}

}  // namespace

int64_t Run::put(int64_t position, Value value) {
  const auto index = static_cast<std::size_t>(position);
  if (values.size() <= index) values.resize(index + 1);
  drop(position);
  value.bytes = static_cast<int64_t>(value.tensor.has_storage() ? value.tensor.nbytes() : 0);
  return (values[index] = std::move(value)).bytes;
}

bool Run::has(int64_t position) const {
  const auto index = static_cast<std::size_t>(position);
  return index < values.size() && values[index].tensor.defined();
}

Value Run::take(int64_t position) {
  const auto index = static_cast<std::size_t>(position);
  Value value = std::exchange(values[index], Value());
  count(live_counters.recomputed_bytes_alive, -value.bytes);
  return value;
}

int64_t Run::num_bytes() const {
  int64_t bytes = 0;
  for (const Value& value : values) bytes += value.bytes;
  return bytes;
}

bool Run::owns_alone(int64_t position) const {
  if (!has(position)) return false;
  const at::Tensor& value = values[static_cast<std::size_t>(position)].tensor;
  if (!value.has_storage()) return false;
  References references;  // to each tensor of that storage, from here
  for (const Value& each : values)
    for (const at::Tensor* tensor : {&each.tensor, &each.alias})
      if (tensor->defined() && tensor->has_storage() && tensor->is_alias_of(value))
        ++references[tensor->unsafeGetTensorImpl()];
  add_bases(references);
  for (const auto& [impl, count] : references)
    if (c10::raw::intrusive_ptr::use_count(impl) != count) return false;
  return value.storage().use_count() == references.size();
}

void Run::drop(int64_t position) noexcept {
  const auto index = static_cast<std::size_t>(position);
  if (index >= values.size() || !values[index].tensor.defined()) return;
  count(live_counters.recomputed_bytes_alive, -values[index].bytes);
  values[index] = Value();
}

void Run::clear() noexcept {
  for (std::size_t i = 0; i < values.size(); ++i) drop(static_cast<int64_t>(i));
  values.clear();
}

void Run::tell_change() noexcept {
  num_changes_.fetch_add(1, std::memory_order_release);
  num_changes_.notify_all();
}

void Run::wait_for_change(std::unique_lock<SpinLock>& lock) {
  const uint32_t before = num_changes_.load(std::memory_order_acquire);
  lock.unlock();
  num_changes_.wait(before, std::memory_order_acquire);
  lock.lock();
}

}  // namespace remat
