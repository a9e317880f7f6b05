#pragma once
// The workers as one process group, over LibTorch's own Gloo.

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
// Needs Gloo's headers and USE_C10D_GLOO. Gloo itself is in libtorch_cpu, so no other library is
// linked.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "place.h"
#include "staged_gloo.h"
#include "store.h"

struct Group {
  c10::intrusive_ptr<c10d::Backend> backend;             // for tensors on the worker's device
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;  // the same, for the Reducer
};

// Joins the group after all others have come. A wait for another worker longer than a minute
// throws.
inline Group join_group(const Store& store, const Place& place) {
  const auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  Group group;
  const auto gloo =
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, place.rank, place.size, options);
  const c10::DeviceType device = place.target.device.type();
  group.backend = gloo;
  group.process_group = c10::make_intrusive<c10d::ProcessGroup>(store, place.rank, place.size);
  group.process_group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo);
  group.process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  if (device != c10::kCPU) {
    group.backend = c10::make_intrusive<StagedGloo>(gloo);
    group.process_group->setBackend(device, c10d::ProcessGroup::BackendType::CUSTOM, group.backend);
  }
  group.process_group->setGroupName("workers");
  return group;
}
