#include "lib/state/parameter_names.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include "lib/base/type_name.h"

namespace remat {

namespace {

/// Looks among some tensors of a module for one that is the object itself, or that alone has its storage.
class ParameterSearch {
 public:
  struct Found {
    const char* kind = "";
    std::string path{};
  };

  ParameterSearch(const c10::TensorImpl* object, const c10::StorageImpl* storage)
      : object_(object), storage_(storage) {}

  void add(const char* kind, const torch::OrderedDict<std::string, at::Tensor>& tensors) {
    for (const auto& each : tensors) {
      if (!each.value().defined()) continue;
      if (each.value().unsafeGetTensorImpl() == object_ && same_.path.empty())
        same_ = {kind, each.key()};
      if (storage_ == nullptr || storage_of(each.value()) != storage_) continue;
      if (num_sharing_++ == 0) sharing_ = {kind, each.key()};
    }
  }

  const Found& best() const {
    static const Found none;
    return !same_.path.empty() ? same_ : num_sharing_ == 1 ? sharing_ : none;
  }

 private:
  const c10::TensorImpl* const object_;
  const c10::StorageImpl* const storage_;
  Found same_, sharing_;
  int num_sharing_ = 0;
};

}  // namespace

std::string parameter_name(const UserRegistrations& registered, const TensorIdentity& tensor) {
  // What is gone is no tensor of a module any more, and its place may be another's.
  const auto object = tensor.object.lock();
  const auto storage = tensor.storage.lock();
  if (!object && !storage) return {};
  for (auto held = registered.held.rbegin(); held != registered.held.rend(); ++held) {
    const auto module = (*held)->module();
    if (module == nullptr) continue;
    ParameterSearch search(object.get(), storage.get());
    search.add("parameter", module->named_parameters());
    search.add("buffer", module->named_buffers());
    if (const auto& found = search.best(); !found.path.empty())
      return fmt::format("{} '{}' of {}", found.kind, found.path, short_type(typeid(*module)));
  }
  return {};
}

}  // namespace remat
