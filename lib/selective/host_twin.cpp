#include "lib/selective/host_twin.h"

#include <utility>

#include "lib/seam/storage.h"

namespace remat {

namespace {

using Owner = std::shared_ptr<HostTwin>;

void let_go(void* owner) { delete static_cast<Owner*>(owner); }

at::Tensor like(const at::Tensor& value, c10::Storage storage) {
  at::Tensor twin = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), value.dtype());
  twin.unsafeGetTensorImpl()->set_sizes_and_strides(value.sizes(), value.strides(), 0);
  return twin;
}

}  // namespace

HostTwin::HostTwin(const at::Tensor& value, std::shared_ptr<Piece> piece, at::Tensor host,
                   bool is_beside)
    : piece_(std::move(piece)),
      host_(std::move(host)),
      counter_(value.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.enabled() ? counter_.current_version() : 0),
      state_(is_beside && counter_.enabled() ? State::Pending : State::Same) {}

at::Tensor HostTwin::make(const at::Tensor& value, std::shared_ptr<Piece> piece, bool is_beside) {
  at::Tensor host = piece->host_memory();
  if (!host.defined()) return {};
  void* const memory = host.data_ptr();
  auto owner = std::make_unique<Owner>(
      std::make_shared<HostTwin>(value, std::move(piece), std::move(host), is_beside));
  return like(value, c10::Storage(c10::Storage::use_byte_size_t(), value.nbytes(),
                                  at::DataPtr(memory, owner.release(), &let_go, c10::kCPU),
                                  /*allocator=*/nullptr, /*resizable=*/false));
}

at::Tensor HostTwin::without_memory(const at::Tensor& value, std::string_view text) {
  return like(value, seam::storage_without_data(value.nbytes(), c10::kCPU, text));
}

std::shared_ptr<HostTwin> HostTwin::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage() ||
      seam::has_storage_without_data(tensor))
    return nullptr;
  const at::DataPtr& memory = tensor.storage().data_ptr();
  if (memory.get_deleter() != &let_go || tensor.storage_offset() != 0 || tensor.is_conj() ||
      tensor.is_neg())
    return nullptr;
  return *static_cast<const Owner*>(memory.get_context());
}

bool HostTwin::is_changed() const {
  const State state = state_;
  return state == State::Changed ||
         (state == State::Pending && counter_.current_version() != version_);
}

void HostTwin::settle() { state_ = is_changed() ? State::Changed : State::Same; }

}  // namespace remat
