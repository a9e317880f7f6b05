#include "lib/frame/captured_operands.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "lib/base/planted_fault.h"
#include "lib/frame/frame_scope.h"
#include "lib/frame/inputs.h"
#include "lib/frame/naming.h"
#include "lib/seam/autograd_meta.h"
#include "lib/tensor/tensor_metadata.h"

namespace remat {

namespace {

using torch::autograd::Node;

/// Returns the address of a version counter, which is the same for all tensors that share the
/// counter.
const void* address_of(const c10::VariableVersion& counter) {
  const void* address = nullptr;
  static_assert(sizeof(counter) == sizeof(address));
  std::memcpy(&address, static_cast<const void*>(&counter), sizeof(address));
  return address;
}

/// Returns the low bits of the offset; 0 for kinds of tensors that compute it, possibly in Python.
uint32_t offset_of(const c10::TensorImpl& impl) {
  const bool is_plain = impl.has_storage() && !impl.is_python_dispatch() && !impl.is_nested() &&
                        !impl.has_symbolic_sizes_strides();
  return is_plain ? static_cast<uint32_t>(impl.storage_offset()) : 0;
}

/// Returns the name by which the regions of this thread know the operand. A region inside the
/// recomputed one may know the module.
std::string name_here(const CapturedOperand& operand) {
  std::string name;
  detail::visit_regions([&](detail::RegionScope& scope) {
    if (name.empty() && !scope.is_save_region)
      name = name_of(static_cast<FrameScope&>(scope).frame().region(),
                     {operand.object, operand.storage});
  });
  return name;
}

/// Returns the number of the operator at work, whose node was the last that this thread made.
uint64_t number_at_work() { return at::sequence_number::peek() - 1; }

}  // namespace

bool CapturedOperand::is_changed() const {
  if (counter.current_version() != version) return true;
  const auto alive = object.lock();
  return alive && (known_storage_of(at::Tensor(alive)) != storage._unsafe_get_target() ||
                   offset_of(*alive) != offset);
}

bool CapturedOperands::Noted::has(const c10::VariableVersion& counter) const {
  if (!index.empty()) return index.contains(address_of(counter));
  return std::any_of(all.rbegin(), all.rend(), [&](const CapturedOperand& each) {
    return seam::is_same_counter(each.counter, counter);
  });
}

void CapturedOperands::note(const at::TensorBase& tensor, const Inputs& inputs) {
  constexpr std::size_t max_scanned = 16;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::VariableVersion& counter = impl.version_counter();
  if (impl.is_wrapped_number() || !counter.enabled()) return;
  if (noted_ != nullptr && noted_->has(counter)) return;
  const at::TensorRef borrowed(tensor);  // a counted reference would ask Python for its lock
  const at::Tensor& operand = *borrowed;
  if (inputs.watches(known_storage_of(operand))) return;
  if (noted_ == nullptr) noted_ = std::make_unique<Noted>();
  WeakTensor object = weak_object_of(operand);
  const uint32_t offset = offset_of(*object._unsafe_get_target());
  noted_->all.push_back({.counter = counter,
                         .object = std::move(object),
                         .storage = weak_known_storage_of(operand),
                         .version = counter.current_version(),
                         .offset = offset});
  if (!noted_->index.empty()) {
    noted_->index.insert(address_of(counter));
  } else if (noted_->all.size() > max_scanned) {
    for (const CapturedOperand& each : noted_->all) noted_->index.insert(address_of(each.counter));
  }
}

void CapturedOperands::settle() {
  std::unordered_set<const void*>().swap(noted_->index);
  std::erase_if(noted_->all, [](const CapturedOperand& each) { return !each.is_alive(); });
  noted_->all.shrink_to_fit();
  if (noted_->all.empty()) noted_.reset();
}

std::vector<const CapturedOperand*> CapturedOperands::changed() const {
  std::vector<const CapturedOperand*> all;
  if (noted_ == nullptr || is_planted(Fault::CaptureCheck)) return all;
  for (const CapturedOperand& each : noted_->all)
    if (each.is_changed()) all.push_back(&each);
  return all;
}

ChangedOperands::ChangedOperands(const RegionStart& forward, const CapturedOperands& noted,
                                 const std::vector<const CapturedOperand*>& changed,
                                 const StorageSet* vouched,
                                 c10::function_ref<bool(const at::Tensor&)> is_given)
    : forward_(forward), noted_(noted), vouched_(vouched), is_given_(is_given) {
  for (const CapturedOperand* each : changed)
    changes_.push_back({each, each->counter.current_version(), /*is_read=*/false, {}});
  if (changes_.empty()) pass_over_from(here_.sequence, here_.thread);
}

void ChangedOperands::forgive_operator() {
  if (at::RecordFunction::currentThreadId() != here_.thread) return;
  if (tainted_.empty() && new_nodes_.empty()) return;
  tainted_.erase(number_at_work());
  forgiven_.insert(number_at_work());
  is_work_tainted_ = false;
}

// A program may ask for a node and compute nothing with it, and a Python Function asks before its
// own node exists. So the edges of an operator's node decide which tensors it was given.
bool ChangedOperands::is_tainted(const Node& node) const {
  if (!is_made_here(node) || forgiven_.contains(node.sequence_nr())) return false;
  if (tainted_.contains(node.sequence_nr())) return true;
  const auto& edges = node.next_edges();
  return std::any_of(edges.begin(), edges.end(), [&](const torch::autograd::Edge& edge) {
    const Node* const source = edge.function.get();
    return source != nullptr &&
           (is_made_here(*source)
                ? tainted_.contains(source->sequence_nr())
                : std::find(new_nodes_.begin(), new_nodes_.end(), source) != new_nodes_.end());
  });
}

// See Note [State with a history].
bool ChangedOperands::is_new_state(const at::TensorBase& tensor, const Node& node) {
  if (is_made_here(node) || &node == passed_node_) return false;
  if (!new_nodes_.empty() &&
      std::find(new_nodes_.begin(), new_nodes_.end(), &node) != new_nodes_.end())
    return true;
  const bool is_of_forward = node.thread_id() == forward_.thread;
  if (is_of_forward ? node.sequence_nr() < forward_.sequence : node.thread_id() != here_.thread)
    return false;
  const at::TensorRef borrowed(tensor);
  const at::Tensor& state = *borrowed;
  const c10::VariableVersion& counter = state.unsafeGetTensorImpl()->version_counter();
  if (is_given_(state)) {
    passed_node_ = &node;
    return false;
  }
  if ((!is_of_forward && noted_.has(counter)) || leaf_behind(state) != nullptr ||
      (vouched_ != nullptr && vouched_->contains(known_storage_of(state))) ||
      is_planted(Fault::CaptureCheck))
    return false;
  constexpr std::size_t max_described = 5;  // as many as an error lists
  new_nodes_.push_back(&node);
  pass_over_from(UINT64_MAX, here_.thread);  // its results may be tainted, too
  if (new_state_.size() < max_described)
    new_state_.push_back({TensorIdentity::of(state), TensorMetadata(state, false).text() +
                                                         ", made by " + node.name() +
                                                         " after forward began"});
  return true;
}

void ChangedOperands::node_asked(const at::TensorBase& tensor, const Node* node) {
  const bool is_new = node != nullptr && is_new_state(tensor, *node);
  if (node != nullptr && !is_new && changes_.empty() && new_nodes_.empty()) return;
  const uint64_t number = number_at_work();
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::StorageImpl* const storage = impl.unsafe_storage().unsafeGetStorageImpl();
  if (number != at_work_) {
    operands_.clear();
    is_work_tainted_ = false;
  }
  at_work_ = number;
  operands_.push_back(storage);
  if (node != nullptr && is_tainted(*node)) {
    tainted_.insert(node->sequence_nr());
    is_work_tainted_ = true;
  }
  is_work_tainted_ |= is_new;
  if (changes_.empty()) return;
  const c10::VariableVersion& counter = impl.version_counter();
  if (!counter.enabled() || (vouched_ != nullptr && vouched_->contains(storage))) return;
  for (Change& each : changes_)
    if (seam::is_same_counter(each.then->counter, counter) &&
        counter.current_version() == each.version) {
      if (!std::exchange(each.is_read, true)) each.name = name_here(*each.then);
      tainted_.insert(number);
      is_work_tainted_ = true;
    }
}

bool ChangedOperands::made(const at::Tensor& saved, bool is_made_inside) {
  if (const Node* const node = seam::node_of(saved))
    return ((!tainted_.empty() || !new_nodes_.empty()) && is_tainted(*node)) ||
           is_new_state(saved, *node);
  // A tensor without a node is an argument of the operator at work, or was made by its kernel.
  return is_work_tainted_ && is_made_inside && at_work_ == number_at_work() &&
         std::find(operands_.begin(), operands_.end(), storage_of(saved)) == operands_.end();
}

}  // namespace remat
