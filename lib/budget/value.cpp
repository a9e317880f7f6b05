#include "lib/budget/value.h"

#include <algorithm>
#include <utility>

#include "lib/seam/plain_tensor.h"

namespace remat::budget {

uint64_t next_walk() {
  static uint64_t num_walks = 0;
  return ++num_walks;
}

Geometry::Geometry(const at::Tensor& tensor)
    : keys(tensor.key_set()),
      dtype(tensor.dtype()),
      sizes(tensor.sizes().begin(), tensor.sizes().end()),
      strides(tensor.strides().begin(), tensor.strides().end()),
      offset(tensor.storage_offset()) {}

at::Tensor Geometry::on(c10::Storage storage) const {
  at::Tensor tensor = seam::plain_tensor(std::move(storage), keys, dtype);
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  impl.set_version_counter(c10::VariableVersion(0));
  impl.set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

void Value::note_version(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;
  counter = tensor.unsafeGetTensorImpl()->version_counter();
  version = counter.current_version();
}

// Factories like `torch::full` return a shallow copy with a version counter of its own, which
// begins at 0. The counter noted at the operator then counts no writes, and nothing else refers to
// it.
bool Value::is_content_of(const at::Tensor& tensor) {
  if (!counter.enabled() || !counter.unique()) return !has_changed();
  note_version(tensor);
  return version == 0;
}

c10::Storage Value::content() const {
  c10::Storage found = held ? held : c10::Storage(where.lock());
  const bool is_gone = found && !device.is_cpu() && found.data_ptr().get() != data;
  return is_gone ? c10::Storage() : found;
}

bool Value::has_content() const {
  if (device.is_cpu()) return held || (is_listed && !where.expired());
  return static_cast<bool>(content());
}

bool Value::is_needed() const {
  const uint64_t walk = next_walk();
  std::vector<const Value*> made_of{this};
  while (!made_of.empty()) {
    const Value& next = *made_of.back();
    made_of.pop_back();
    for (const Read* read = next.reads; read != nullptr; read = read->next) {
      if (std::exchange(read->record->walk, walk) == walk) continue;
      for (const Value* const result : read->record->results) {
        if (result == nullptr || result->is_available()) continue;
        if (!result->saves.empty() || result->num_locks > 0) return true;
        made_of.push_back(result);
      }
    }
  }
  return false;
}

void Record::add_reads(c10::ArrayRef<Value*> values) {
  reads.reserve(values.size());
  for (Value* const value : values) {
    const bool is_known = std::any_of(reads.begin(), reads.end(),
                                      [&](const Read& each) { return each.value == value; });
    if (is_known) continue;
    Read& read = reads.emplace_back();
    read = {value, this, nullptr, value->reads};
    if (value->reads != nullptr) value->reads->before = &read;
    value->reads = &read;
    value->own();
  }
}

}  // namespace remat::budget
