// saved_tensors(): the tensors that a graph holds, before any backward.

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <unordered_set>

#include "hooks/pack/inspection.h"
#include "lib/observe/origins.h"
#include "lib/seam/engine.h"
#include "lib/seam/saved_of_node.h"
#include "remat/report.h"

namespace remat {

std::vector<SavedTensorInfo> saved_tensors(const at::Tensor& root) {
  std::vector<SavedTensorInfo> infos;
  std::unordered_set<const void*> owners;
  for (const seam::NodePtr& node : seam::nodes_below(root)) {
    if (dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get()) != nullptr) continue;
    const std::string name = node->name();
    const std::size_t first = infos.size();
    Inspection inspection;
    const seam::SavedOfNode saved = seam::saved_of(node);
    for (const at::Tensor& tensor : saved.tensors) {
      if (inspection.is_stand_in(tensor)) continue;
      SavedTensorInfo info{
          .node = name, .sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()};
      if (tensor.has_storage()) {
        info.bytes = static_cast<int64_t>(tensor.storage().nbytes());
        info.shares_storage = !owners.insert(tensor.storage().unsafeGetStorageImpl()).second;
      }
      infos.push_back(std::move(info));
    }
    for (HeldInfo& held : inspection.found()) {
      const bool is_shared = held.owner != nullptr && !owners.insert(held.owner).second;
      infos.push_back({.node = name,
                       .region = std::move(held.region),
                       .sizes = std::move(held.sizes),
                       .dtype = held.dtype,
                       .bytes = held.bytes,
                       .shares_storage = is_shared,
                       .dropped = held.dropped});
    }
    if (infos.size() > first) {
      const NodeOrigin origin = origin_of(node->thread_id(), node->sequence_nr());
      for (std::size_t i = first; i < infos.size(); ++i) {
        infos[i].module = origin.module;
        infos[i].op = origin.op;
        infos[i].place = origin.place;
      }
    }
    if (!saved.is_known) infos.push_back({.node = name + " (saves what it does not tell)"});
  }
  return infos;
}

}  // namespace remat
