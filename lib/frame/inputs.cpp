#include "lib/frame/inputs.h"

#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "lib/base/byte_hash.h"
#include "lib/base/error.h"
#include "lib/base/place_index.h"
#include "lib/base/planted_fault.h"
#include "lib/frame/input_copies.h"
#include "lib/frame/layers.h"
#include "lib/frame/mismatch.h"
#include "lib/scope/saving_input.h"
#include "lib/seam/autograd_meta.h"
#include "lib/seam/engine.h"
#include "lib/tensor/content_hash.h"

namespace remat {

namespace {

/// Ends the gradient of a recompute's own backward at the input, which is the node's output with
/// that number.
seam::NodePtr input_edge(uint32_t output_number) {
  auto node = seam::make_node<seam::EndNode>("remat::InputEdge");
  for (uint32_t i = 0; i < output_number; ++i)
    node->add_input_metadata(torch::autograd::Node::undefined_input());
  return node;
}

uint32_t low_bits(const void* address) {
  return static_cast<uint32_t>(combine(odd_multiplier, reinterpret_cast<uintptr_t>(address)));
}

/// Returns a hash of the places of a tensor's elements in its storage, and of their type. For
/// sparse tensors, a hash of the tensors that hold the elements.
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

/// Returns the address of a tensor's memory, or null without a storage.
const void* data_of(const at::Tensor& tensor) {
  return storage_of(tensor) == nullptr ? nullptr : storage_of(tensor)->data();
}

}  // namespace

Inputs::Watched::Watched(const at::Tensor& given)
    : storage(weak_memory_of(given)),
      object(given.getIntrusivePtr()),
      counter(given.unsafeGetTensorImpl()->version_counter()),
      version(counter.current_version()) {}

bool Inputs::Copy::shares_memory() const {
  const auto alive = storage.lock();
  return shared_data != nullptr && alive && alive->data() == shared_data;
}

SlotFiller* Inputs::save(const Region& region) {
  RegionBody& body = *region.body;
  SlotFiller* stops = nullptr;
  c10::SmallVector<const c10::TensorImpl*, 8> impls;
  PlaceIndex places;
  std::optional<InputCopies> copies;
  if (region.options.copies_inputs) {
    copies.emplace(InputCopies::How::Lazily);
    body.visit_inputs([&](at::Tensor& kept) {
      if (kept.defined()) copies->expect(kept);
    });
  }
  body.visit_inputs([&](at::Tensor& kept) {
    const at::Tensor tensor = std::exchange(kept, at::Tensor());
    if (!tensor.defined()) {
      saved_.emplace_back();
      impls.push_back(nullptr);
      return;
    }
    // Saved once more nevertheless: in a parent's recompute the two may be different tensors, and
    // the number of slots must not depend on that.
    const auto same_as = static_cast<int32_t>(places.find(
        tensor.unsafeGetTensorImpl(), impls.size(), [&](std::size_t i) { return impls[i]; }));
    storages_.add(tensor);
    const auto storage_number = static_cast<int32_t>(storages_.number_of(memory_of(tensor)));
    if (seam::has_tangent(tensor)) throw CarriesTangent();
    const GradRole role = grad_role_of(tensor);
    const bool has_edge = role == GradRole::Leaf || role == GradRole::Result;
    const at::Tensor copy = copies ? copies->copy_of(tensor) : at::Tensor();
    SavingInput saving(tensor, &stops);
    // May throw, as a growing SmallVector must not.
    HeldInput held(copy.defined() ? copy : tensor, has_edge && !copy.defined());
    Input& input = saved_.emplace_back(std::move(held));
    if (has_edge) {
      input.edge = WeakEdge(tensor, role);
      input.has_tensor_hooks = !torch::autograd::impl::hooks(tensor).empty();
    }
    input.role = role;
    input.is_view = role == GradRole::Result && tensor.is_view();
    input.same_as = same_as;
    input.storage_number = storage_number;
    if (role != GradRole::Result || copy.defined()) input.layout = layout_of(tensor);
    input.counter = tensor.unsafeGetTensorImpl()->version_counter();
    input.version = input.counter.current_version();
    impls.push_back(tensor.unsafeGetTensorImpl());
    if (role == GradRole::Result && seam::has_beside(tensor))
      input.beside = std::make_unique<seam::Beside>(seam::beside_values(tensor));
    if (copy.defined())
      input.copy =
          std::make_unique<Copy>(Copy{WeakTensor(tensor.getIntrusivePtr()), weak_storage_of(copy),
                                      data_of(copy) == data_of(tensor) ? data_of(copy) : nullptr});
    if (input.held.has_hooks() && !saving.is_slot())
      input.watched = std::make_unique<Watched>(copy.defined() ? copy : tensor);
    if (storage_number >= 0 && (input.copy != nullptr || input.watched != nullptr)) {
      if (unwatched_ == nullptr) unwatched_ = std::make_unique<std::vector<bool>>();
      const auto at = static_cast<std::size_t>(storage_number);
      unwatched_->resize(std::max(unwatched_->size(), at + 1));
      (*unwatched_)[at] = true;
    }
    if (!region.options.offload_inputs || tensor.is_cpu()) return;
    // A slot of the region around, or a tensor that a user's hooks took, is no longer held here.
    if (input.held.has_hooks()) return;
    auto hooks = layers.offload_input(
        tensor, region.extras == nullptr ? std::nullopt : region.extras->offload_prefetch_depth);
    if (hooks != nullptr) input.held.offload(std::move(hooks));
  });
  return stops;
}

bool Inputs::is_any_written() const {
  return std::any_of(saved_.begin(), saved_.end(), [this](const Input& each) {
    return is_settled_ ? each.is_written : each.has_moved();
  });
}

bool Inputs::is_written(const Input& input) const {
  if (is_settled_) return input.is_written;
  return std::any_of(saved_.begin(), saved_.end(), [&](const Input& other) {
    return other.has_moved() &&
           (&other == &input ||
            (input.storage_number >= 0 && other.storage_number == input.storage_number));
  });
}

void Inputs::note_written() {
  std::unordered_set<int32_t> written;  // numbers of storages
  for (const Input& each : saved_)
    if (each.has_moved()) written.insert(each.storage_number);
  for (Input& input : saved_)
    input.is_written =
        input.has_moved() || (input.storage_number >= 0 && written.contains(input.storage_number));
}

bool Inputs::note_statistics(const Region& region, const c10::StorageImpl* statistics) {
  const int64_t number = storages_.number_of(statistics);
  for (Input& each : saved_)
    each.is_moved |= number >= 0 && each.storage_number == number && each.copy == nullptr &&
                     !region.options.ignores_buffers;
  return number >= 0;
}

std::vector<HeldInput> Inputs::settle() {
  if (is_any_written()) note_written();
  bool is_any_compared = false;
  for (Input& input : saved_) is_any_compared |= input.is_object() && input.is_in_place();
  is_settled_ = true;
  std::vector<HeldInput> lost;
  for (Input& input : saved_) {
    if (!input.is_held() && input.copy == nullptr)
      input.counter = c10::VariableVersion(c10::VariableVersion::DISABLED);
    input.is_lost = (input.is_written && input.is_held()) || input.is_moved;
    if (input.copy != nullptr) input.copy->is_lazy = input.copy->shares_memory();
    if (input.is_lost) lost.push_back(std::exchange(input.held, {}));
  }
  // Storages of inputs held by the region around, or by hooks, would only keep the remains of a
  // storage alive.
  if (!is_any_compared) storages_.clear();
  unwatched_.reset();
  return lost;
}

// See Note [Inputs that are copies].
bool Inputs::Input::is_copy_stale(const at::Tensor& data) const {
  if (copy == nullptr || copy->shared_data == nullptr || !has_moved() ||
      storage_of(data) != copy->storage._unsafe_get_target() || data_of(data) != copy->shared_data)
    return false;
  const auto original = copy->original.lock();
  if (!original) return false;
  const at::Tensor now(original);
  // If the argument was given other data, its version does not describe the memory of the copy.
  return data_of(now) == copy->shared_data && layout_of(now) == layout;
}

/// Returns the identity of an input, as far as it is known without the tensor.
TensorIdentity Inputs::identity_of(const Input& input) const {
  TensorIdentity identity;
  if (const at::Tensor leaf = input.edge.leaf(); leaf.defined())
    identity.object = WeakTensor(leaf.getIntrusivePtr());
  else if (input.copy != nullptr)
    identity.object = input.copy->original;
  else if (input.watched != nullptr)
    identity.object = input.watched->object;
  identity.storage = storages_.weak_at(input.storage_number);
  return identity;
}

/// Returns whether the input's storage was resized to zero bytes, so that reading it would crash.
/// Leaves are exempt: sharded parameters are freed in this way between uses, and have their memory
/// again when the function reads them.
bool Inputs::Input::is_freed(const at::Tensor& data) const {
  return role != GradRole::Leaf && storage_of(data) != nullptr && storage_of(data)->nbytes() == 0 &&
         data.numel() > 0 && data.layout() == c10::kStrided && !data.is_meta() &&
         !data._is_zerotensor() && !has_no_memory(data);
}

// A tensor that a user's hooks hold must not be written to, and may be the original.
at::Tensor Inputs::unpack(const Region& region, const Input& input, std::size_t number) const {
  const auto position = static_cast<int64_t>(number);
  Watched* const watched = input.watched.get();
  if (input.is_lost || (input.is_held() && input.has_moved())) {
    if (input.is_moved) throw_moved_statistics(region, position, identity_of(input));
    throw_changed_argument(region, position, identity_of(input), input.version,
                           input.counter.current_version(),
                           input.is_lost || !is_settled_ ? ChangedBy::Function : ChangedBy::Others);
  }
  if (watched != nullptr && watched->is_spoiled) throw_spoiled_argument(region, position);
  const uint32_t expected = watched == nullptr ? 0 : watched->version.load();
  const uint32_t version = watched == nullptr ? 0 : watched->counter.current_version();
  at::Tensor data = input.held.unpack();
  if (!data.defined()) return data;
  if (input.is_copy_stale(data))
    throw_unseen_write(region, position, identity_of(input), input.version,
                       input.counter.current_version());
  bool is_original = input.is_object() && input.is_in_place();
  const c10::StorageImpl* storage = nullptr;
  if (watched != nullptr) {
    const bool is_alias =
        seam::is_same_counter(data.unsafeGetTensorImpl()->version_counter(), watched->counter) ||
        (storage_of(data) != nullptr && memory_of(data) == watched->storage._unsafe_get_target());
    if (version != expected && is_alias)
      throw_changed_argument(region, position, identity_of(input), expected, version,
                             input.is_written ? ChangedBy::Function : ChangedBy::Others,
                             /*is_held_by_hooks=*/true);
    if (version == expected) watched->version = watched->counter.current_version();
    is_original =
        input.copy == nullptr && data.unsafeGetTensorImpl() == watched->object._unsafe_get_target();
    storage = watched->storage._unsafe_get_target();
  } else if (is_original) {
    storage = storages_.at(input.storage_number);
  }
  if (region.options.capture_check != CaptureCheck::Raise) return data;
  const bool is_replaced = is_original && !is_planted(Fault::ReplacedArgument) &&
                           (memory_of(data) != storage || layout_of(data) != input.layout);
  if (is_replaced || input.is_freed(data)) throw_replaced_argument(region, position, data);
  return data;
}

/// Returns whether inputs that shared a storage in forward were given different ones.
bool Inputs::is_any_parted(const std::vector<at::Tensor>& given) const {
  std::unordered_map<int64_t, const c10::StorageImpl*> storages;
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    if (saved_[i].storage_number < 0) continue;
    const c10::StorageImpl* const storage = memory_of(given[i]);
    if (storages.try_emplace(saved_[i].storage_number, storage).first->second != storage)
      return true;
  }
  return false;
}

// See Note [Functions that write to arguments] and Note [Inputs that are copies]. Returns which of
// the tensors belong to the recompute alone.
std::vector<bool> Inputs::copy(const Region& region, std::vector<at::Tensor>& tensors,
                               bool is_any_written) const {
  InputCopies at_once(InputCopies::How::AtOnce), lazy(InputCopies::How::Lazily);
  const std::vector<at::Tensor> given = tensors;
  std::vector<bool> are_own(saved_.size());
  const bool are_parted = is_any_written && is_any_parted(given);
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    const Input& input = saved_[i];
    if (!given[i].defined() || input.same_as >= 0 || is_planted(Fault::WrittenArgument) ||
        !(input.copy != nullptr || (is_any_written && input.held.has_hooks())))
      continue;
    for (std::size_t j = 0; are_parted && is_written(input) && j < saved_.size(); ++j)
      if (input.storage_number >= 0 && saved_[j].storage_number == input.storage_number &&
          memory_of(given[j]) != memory_of(given[i]))
        throw_parted_arguments(region, static_cast<int64_t>(i), static_cast<int64_t>(j));
    const bool is_lazy = input.copy != nullptr && input.copy->is_lazy && !is_written(input);
    if (at::Tensor made = (is_lazy ? lazy : at_once).copy_of(given[i]); made.defined()) {
      tensors[i] = std::move(made);
      are_own[i] = true;
    } else if (input.copy != nullptr) {
      tensors[i] = given[i].tensor_data();
    }
  }
  return are_own;
}

/// Returns whether a leaf is as it was at the call, with the data that were unpacked. Hooks may
/// have returned a copy of the data or, if they are lossy, other data.
bool Inputs::Input::is_unchanged(const at::Tensor& leaf, const at::Tensor& data) const {
  if (!leaf.defined() || grad_role_of(leaf) != GradRole::Leaf || layout_of(leaf) != layout)
    return false;
  if (storage_of(data) != nullptr && storage_of(leaf) == storage_of(data)) return true;
  if (copy != nullptr && data_of(data) != nullptr && data_of(leaf) == data_of(data)) return true;
  return !is_in_place() && content_hash(leaf) == content_hash(data);
}

at::Tensor Inputs::Input::in_role(at::Tensor data, bool is_any_written, bool runs_backward) const {
  if (is_object() && grad_role_of(data) == role) return data;
  // The user may have changed its role since, or given it other data.
  if (role == GradRole::Leaf && !is_any_written && !is_planted(Fault::ArgumentObject))
    if (at::Tensor leaf = edge.leaf();
        is_unchanged(leaf, data) && !(runs_backward && !torch::autograd::impl::hooks(leaf).empty()))
      return leaf;
  at::Tensor alias = held.builds_alias() ? std::move(data) : data.tensor_data();
  switch (role) {
    case GradRole::None:
      break;
    case GradRole::Leaf:
      alias.set_requires_grad(true);
      break;
    case GradRole::Result: {
      if (is_view && !is_any_written && !runs_backward) {
        // The viewed tensor requires grad, as in forward: a view of it without grad mode also
        // claims to require grad.
        const at::Tensor base = alias.tensor_data().set_requires_grad(true);
        alias = torch::autograd::make_variable_differentiable_view(
            alias, torch::autograd::ViewInfo(base, nullptr, nullptr), std::nullopt,
            /*shared_view_info=*/false, torch::autograd::CreationMeta::DEFAULT);
      }
      torch::autograd::create_gradient_edge(
          alias, input_edge(beside == nullptr ? 0 : beside->output_number));
      if (beside == nullptr) break;
      if (beside->retains_grad) alias.retain_grad();
      seam::set_grad(alias, beside->grad);
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
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    const Input& input = saved_[i];
    tensors.push_back(input.same_as >= 0 ? tensors[static_cast<std::size_t>(input.same_as)]
                                         : unpack(region, input, i));
  }
  const bool is_any_written = this->is_any_written();
  std::vector<bool> are_own;
  if (is_any_written || region.options.copies_inputs)
    are_own = copy(region, tensors, is_any_written);
  for (std::size_t i = 0; i < saved_.size(); ++i) {
    const Input& input = saved_[i];
    at::Tensor& tensor = tensors[i];
    if (!tensor.defined()) continue;
    if (input.same_as >= 0) {
      tensor = tensors[static_cast<std::size_t>(input.same_as)];
      continue;
    }
    tensor = input.in_role(std::move(tensor), is_any_written, runs_backward);
    if (input.watched != nullptr && !is_any_written && (are_own.empty() || !are_own[i]) &&
        !tensor.is_inference()) {
      const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
      given.held.push_back({i, counter, counter.current_version()});
    }
  }
  return given;
}

void Inputs::check_unwritten(const Region& region, const GivenInputs& given) const {
  for (const GivenInputs::Held& each : given.held) {
    if (each.counter.current_version() == each.version) continue;
    saved_[each.input].watched->is_spoiled = true;
    throw_spoiled_argument(region, static_cast<int64_t>(each.input));
  }
}

Inputs::Versions Inputs::versions_in_forward() const {
  Versions versions;
  versions.reserve(saved_.size());
  for (const Input& each : saved_)
    versions.push_back(each.counter.enabled() ? each.counter.current_version() : 0);
  return versions;
}

void Inputs::check_not_ahead(const Region& region, const Versions& before) const {
  for (std::size_t i = 0; i < before.size(); ++i)
    if (saved_[i].counter.enabled() && saved_[i].counter.current_version() != before[i])
      throw_written_ahead(region, static_cast<int64_t>(i));
}

}  // namespace remat
