#include "lib/frame/inputs.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/clone.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "hooks/byte_hash.h"
#include "hooks/elsewhere.h"
#include "lib/base/error.h"
#include "lib/base/planted_fault.h"
#include "lib/frame/mismatch.h"
#include "lib/scope/offload.h"
#include "lib/scope/saving_input.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/engine.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

/// Ends the gradient of a recompute's own backward at the input, which is the node's output with that number.
seam::NodePtr input_edge(uint32_t output_number) {
  auto node = seam::make_node<seam::EndNode>("remat::InputEdge");
  for (uint32_t i = 0; i < output_number; ++i)
    node->add_input_metadata(torch::autograd::Node::undefined_input());
  return node;
}

uint32_t low_bits(const void* address) {
  return static_cast<uint32_t>(combine(odd_multiplier, reinterpret_cast<uintptr_t>(address)));
}

/// A hash of where in its storage a tensor has its elements, and of what type they are. Tensors without
/// a storage: of what stands for it.
uint32_t layout_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  uint64_t hash = static_cast<uint64_t>(tensor.scalar_type());
  const auto add = [&hash](uint64_t word) { hash = combine(hash, word); };
  if (tensor.is_nested() || impl.has_symbolic_sizes_strides()) return static_cast<uint32_t>(hash);
  for (const int64_t size : tensor.sizes()) add(static_cast<uint64_t>(size));
  if (tensor.layout() == c10::kStrided) {
    for (const int64_t stride : tensor.strides()) add(static_cast<uint64_t>(stride));
    if (tensor.has_storage()) add(static_cast<uint64_t>(tensor.storage_offset()));
    add(static_cast<uint64_t>(tensor.is_conj()) * 2 + static_cast<uint64_t>(tensor.is_neg()));
  } else if (tensor.layout() == c10::kSparse) {
    const auto& sparse = static_cast<const at::SparseTensorImpl&>(impl);
    add(low_bits(sparse.indices().unsafeGetTensorImpl()));
    add(low_bits(sparse.values().unsafeGetTensorImpl()));
  }
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

/// Copies of storages, in which tensors stay views of each other.
class StorageCopies {
 public:
  at::Tensor copy_of(const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    const seam::DispatchModeOff unseen;
    const c10::InferenceMode normal(false);
    c10::StorageImpl* const storage = storage_of(tensor);
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (storage == nullptr || typeid(impl) != typeid(c10::TensorImpl) || tensor.is_meta() ||
        tensor._is_zerotensor())
      return tensor.detach().clone();
    Copy& copy = of(tensor, storage);
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(copy.storage),
                                                               impl.key_set(), impl.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(impl.sizes(), impl.strides(),
                                                      impl.storage_offset());
    made.unsafeGetTensorImpl()->set_version_counter(copy.counter);
    return made;
  }

 private:
  struct Copy {
    const c10::StorageImpl* from;
    c10::Storage storage;
    c10::VariableVersion counter{0};
  };
  Copy& of(const at::Tensor& tensor, const c10::StorageImpl* from) {
    for (Copy& each : copies_)
      if (each.from == from) return each;
    const auto num_bytes = static_cast<int64_t>(from->nbytes());
    const auto keys = tensor.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate,
                                                              c10::DispatchKey::Negative});
    at::Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(tensor.storage()), keys, caffe2::TypeMeta::Make<uint8_t>());
    bytes.unsafeGetTensorImpl()->set_sizes_contiguous(num_bytes);
    return copies_.emplace_back(Copy{from, bytes.clone().storage()});
  }
  c10::SmallVector<Copy, 2> copies_;
};

void refuse_tangent(const at::Tensor& tensor) {
  if (seam::has_tangent(tensor))
    throw_unsupported("an argument carries a forward-mode tangent",
                      "forward-mode AD does not see what a recompute does",
                      "call the function without remat::checkpoint while forward-mode AD is used");
}

}  // namespace

void Inputs::save(RegionBody& body, bool offload) {
  c10::SmallVector<const c10::TensorImpl*, 8> impls;
  body.visit_inputs([&](at::Tensor& kept) {
    const at::Tensor tensor = std::exchange(kept, at::Tensor());
    if (!tensor.defined()) {
      saved_.emplace_back();
      impls.push_back(nullptr);
      return;
    }
    // Saved once more all the same: in a parent's recompute the two may be different tensors, and
    // the number of slots must not depend on that.
    const auto known = std::find(impls.begin(), impls.end(), tensor.unsafeGetTensorImpl());
    const auto same_as = static_cast<int32_t>(known == impls.end() ? -1 : known - impls.begin());
    storages_.add(tensor);
    const auto storage_number = static_cast<int32_t>(storages_.number_of(storage_of(tensor)));
    refuse_tangent(tensor);
    const GradRole role = grad_role_of(tensor);
    const bool has_edge = role == GradRole::Leaf || role == GradRole::Result;
    SavingInput saving(tensor);
    Input made(has_edge ? tensor.tensor_data()
                        : tensor);  // may throw, as a growing SmallVector must not
    Input& input = saved_.emplace_back(std::move(made));
    if (has_edge) {
      input.edge = WeakEdge(tensor, role);
      input.has_tensor_hooks = !torch::autograd::impl::hooks(tensor).empty();
    }
    input.role = role;
    input.is_view = role == GradRole::Result && tensor.is_view();
    input.same_as = same_as;
    input.storage_number = storage_number;
    if (role != GradRole::Result) input.layout = layout_of(tensor);
    input.counter = tensor.unsafeGetTensorImpl()->version_counter();
    input.version = input.counter.current_version();
    impls.push_back(tensor.unsafeGetTensorImpl());
    if (role == GradRole::Result && seam::has_beside(tensor))
      input.make_details().beside = seam::beside_values(tensor);
    if (input.variable.has_hooks() && !saving.is_slot()) {
      Details& watched = input.make_details();
      watched.is_watched = true;
      watched.storage = weak_storage_of(tensor);
      watched.object = WeakTensor(tensor.getIntrusivePtr());
      watched.counter = tensor.unsafeGetTensorImpl()->version_counter();
      watched.version = input.version;
    }
    if (!offload || tensor.is_cpu()) return;
    // A slot of the region around, or what a user's hooks took, is not here any more.
    if (!input.variable.has_hooks() && depot_of_inputs()->moves(tensor))
      input.variable.register_hooks(std::make_unique<Elsewhere>(depot_of_inputs(), &tensor));
  });
}

bool Inputs::has_moved(const Input& input) const {
  return input.counter.enabled() && input.counter.current_version() != input.version;
}

bool Inputs::is_written(const Input& input) const {
  if (is_settled_) return input.is_written;
  return std::any_of(saved_.begin(), saved_.end(), [&](const Input& other) {
    return has_moved(other) && (&other == &input || (input.storage_number >= 0 &&
                                                     other.storage_number == input.storage_number));
  });
}

std::vector<torch::autograd::SavedVariable> Inputs::settle() {
  const bool is_any_written = std::any_of(saved_.begin(), saved_.end(),
                                          [this](const Input& each) { return has_moved(each); });
  bool is_any_compared = false;
  for (Input& input : saved_) {
    input.is_written = is_any_written && is_written(input);
    is_any_compared |= input.is_object() && !input.variable.has_hooks();
  }
  is_settled_ = true;
  std::vector<torch::autograd::SavedVariable> lost;
  for (Input& input : saved_) {
    input.counter = c10::VariableVersion(c10::VariableVersion::DISABLED);
    input.is_lost = input.is_written && !input.variable.has_hooks();
    if (input.is_lost) lost.push_back(std::exchange(input.variable, {}));
  }
  // Those of the region around, or of hooks, would only keep what is left of a storage.
  if (!is_any_compared) storages_.clear();
  return lost;
}

// What a user's hooks hold is not to be written to; the original may be what they hold.
at::Tensor Inputs::unpack(const Region& region, const Input& input, std::size_t number) const {
  const auto position = static_cast<int64_t>(number);
  Details* const watched = input.watched();
  if (input.is_lost) throw_written_argument(region, position);
  if (watched != nullptr && watched->is_spoiled) throw_spoiled_argument(region, position);
  const uint32_t expected = watched == nullptr ? 0 : watched->version.load();
  const uint32_t version = watched == nullptr ? 0 : watched->counter.current_version();
  at::Tensor data = input.variable.unpack();
  if (!data.defined()) return data;
  bool is_original = input.is_object() && !input.variable.has_hooks();
  const c10::StorageImpl* storage = nullptr;
  if (watched != nullptr) {
    const bool is_alias =
        seam::is_same_counter(data.unsafeGetTensorImpl()->version_counter(), watched->counter) ||
        (storage_of(data) != nullptr && storage_of(data) == watched->storage._unsafe_get_target());
    if (version != expected && is_alias)
      throw_changed_argument(region, position, data, expected, version, input.is_written);
    if (version == expected) watched->version = watched->counter.current_version();
    is_original = data.unsafeGetTensorImpl() == watched->object._unsafe_get_target();
    storage = watched->storage._unsafe_get_target();
  } else if (is_original) {
    storage = storages_.at(input.storage_number);
  }
  if (is_original && region.options.capture_check == CaptureCheck::Raise &&
      !is_planted(Fault::ReplacedArgument) &&
      (storage_of(data) != storage || layout_of(data) != input.layout))
    throw_replaced_argument(region, position, data);
  return data;
}

// See Note [Functions that write to arguments].
void Inputs::copy_written(const Region& region, std::vector<at::Tensor>& tensors) const {
  StorageCopies copies;
  const std::vector<at::Tensor> given = tensors;
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    const Input& input = saved_[i];
    if (!given[i].defined() || input.same_as >= 0 || !input.variable.has_hooks() ||
        is_planted(Fault::WrittenArgument))
      continue;
    for (std::size_t j = 0; is_written(input) && j < saved_.size(); ++j)
      if (input.storage_number >= 0 && saved_[j].storage_number == input.storage_number &&
          storage_of(given[j]) != storage_of(given[i]))
        throw_parted_arguments(region, static_cast<int64_t>(i), static_cast<int64_t>(j));
    tensors[i] = copies.copy_of(given[i]);
  }
}

/// Whether a leaf is as it was at the call, with the data that were unpacked. Hooks may have given back a
/// copy of them, or, if they are lossy, others.
bool Inputs::is_unchanged(const Input& input, const at::Tensor& leaf, const at::Tensor& data) {
  if (!leaf.defined() || grad_role_of(leaf) != GradRole::Leaf || layout_of(leaf) != input.layout)
    return false;
  if (storage_of(data) != nullptr && storage_of(leaf) == storage_of(data)) return true;
  return input.variable.has_hooks() && content_hash(leaf) == content_hash(data);
}

at::Tensor Inputs::in_role(const Input& input, at::Tensor data, bool is_any_written,
                           bool runs_backward) const {
  if (input.is_object() && grad_role_of(data) == input.role) return data;
  // The user may have changed its role, or given it other data since.
  if (input.role == GradRole::Leaf && !is_any_written && !is_planted(Fault::ArgumentObject))
    if (at::Tensor leaf = input.edge.leaf();
        is_unchanged(input, leaf, data) &&
        !(runs_backward && !torch::autograd::impl::hooks(leaf).empty()))
      return leaf;
  at::Tensor alias = data.tensor_data();
  switch (input.role) {
    case GradRole::None:
      break;
    case GradRole::Leaf:
      alias.set_requires_grad(true);
      break;
    case GradRole::Result: {
      static const seam::Beside nothing;
      const seam::Beside& beside = input.details == nullptr ? nothing : input.details->beside;
      if (input.is_view && !is_any_written && !runs_backward) {
        // What is viewed requires grad, as in forward: a view of it without grad mode claims that it does.
        const at::Tensor base = data.tensor_data().set_requires_grad(true);
        alias = torch::autograd::make_variable_differentiable_view(
            alias, torch::autograd::ViewInfo(base, nullptr, nullptr), std::nullopt,
            /*shared_view_info=*/false, torch::autograd::CreationMeta::DEFAULT);
      }
      torch::autograd::create_gradient_edge(alias, input_edge(beside.output_number));
      if (beside.retains_grad) alias.retain_grad();
      if (input.details != nullptr) seam::set_grad(alias, beside.grad);
      break;
    }
    case GradRole::NoGradViewOfLeaf:
      alias.set_requires_grad(true);
      return without_gradient_edge(alias);
  }
  return alias;
}

GivenInputs Inputs::unpack(const Region& region, bool runs_backward) const {
  GivenInputs given;
  std::vector<at::Tensor>& tensors = given.tensors;
  tensors.reserve(saved_.size());
  bool is_any_written = false;
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    const Input& input = saved_[i];
    tensors.push_back(input.same_as >= 0 ? tensors[static_cast<std::size_t>(input.same_as)]
                                         : unpack(region, input, i));
    is_any_written = is_any_written || is_written(input);
  }
  if (is_any_written) copy_written(region, tensors);
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    const Input& input = saved_[i];
    at::Tensor& tensor = tensors[i];
    if (!tensor.defined()) continue;
    if (input.same_as >= 0) {
      tensor = tensors[static_cast<std::size_t>(input.same_as)];
      continue;
    }
    tensor = in_role(input, std::move(tensor), is_any_written, runs_backward);
    if (input.watched() != nullptr && !is_any_written && !tensor.is_inference()) {
      const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
      given.held.push_back({i, counter, counter.current_version()});
    }
  }
  return given;
}

void Inputs::check_unwritten(const Region& region, const GivenInputs& given) const {
  for (const GivenInputs::Held& each : given.held) {
    if (each.counter.current_version() == each.version) continue;
    saved_[each.input].watched()->is_spoiled = true;
    throw_spoiled_argument(region, static_cast<int64_t>(each.input));
  }
}

}  // namespace remat
