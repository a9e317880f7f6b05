#include "lib/state/parameter_names.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "lib/base/type_name.h"
#include "remat/binding.h"

namespace remat {

namespace {

/// Searches the tensors of a module for the object itself, or for the only one with its storage.
class ParameterSearch {
 public:
  ParameterSearch(const c10::TensorImpl* object, const c10::StorageImpl* storage)
      : object_(object), storage_(storage) {}

  /// `name` makes the text.
  template <class Name>
  void add(const at::Tensor& tensor, const Name& name) {
    if (!tensor.defined()) return;
    if (tensor.unsafeGetTensorImpl() == object_ && same_.empty()) same_ = name();
    if (storage_ == nullptr || storage_of(tensor) != storage_) return;
    if (num_sharing_++ == 0) sharing_ = name();
  }

  const std::string& best() const {
    static const std::string none;
    return !same_.empty() ? same_ : num_sharing_ == 1 ? sharing_ : none;
  }

 private:
  const c10::TensorImpl* const object_;
  const c10::StorageImpl* const storage_;
  std::string same_, sharing_;
  int num_sharing_ = 0;
};

}  // namespace

std::string parameter_name(const TensorNames& names, const TensorIdentity& tensor) {
  const auto object = tensor.object.lock();
  const auto storage = tensor.storage.lock();
  if (!object && !storage) return {};
  ParameterSearch search(object.get(), storage.get());
  names.visit_tensors([&](const std::string& name, const at::Tensor& named) {
    search.add(named, [&] { return name; });
  });
  return search.best();
}

std::string parameter_name(const UserRegistrations& registered, const TensorIdentity& tensor) {
  // A tensor that is gone belongs to no module any more, and its address may be reused.
  const auto object = tensor.object.lock();
  const auto storage = tensor.storage.lock();
  if (!object && !storage) return {};
  for (auto flags = registered.flags.rbegin(); flags != registered.flags.rend(); ++flags) {
    const auto module = (*flags)->module();
    if (module == nullptr) continue;
    if (const auto* const foreign = dynamic_cast<const TensorNames*>(module.get())) {
      if (std::string name = parameter_name(*foreign, tensor); !name.empty()) return name;
      continue;
    }
    ParameterSearch search(object.get(), storage.get());
    const auto add_all = [&](const char* kind, const auto& tensors) {
      for (const auto& each : tensors)
        search.add(each.value(), [&] {
          return fmt::format("{} '{}' of {}", kind, each.key(), short_type(typeid(*module)));
        });
    };
    add_all("parameter", module->named_parameters());
    add_all("buffer", module->named_buffers());
    if (!search.best().empty()) return search.best();
  }
  return {};
}

}  // namespace remat
