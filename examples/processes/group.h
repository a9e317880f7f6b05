#pragma once
// The workers as one process group, over LibTorch's own Gloo.

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
// Needs Gloo's headers and USE_C10D_GLOO; Gloo itself is in libtorch_cpu, so nothing more is linked.
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "place.h"
#include "store.h"

struct Group {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;  // the same, as the Reducer wants it
};

// Waits for the others. A worker that waits for one of them longer than a minute throws.
inline Group join_group(const Store& store, const Place& place) {
  const auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  Group group;
  group.gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, place.rank, place.size, options);
  group.process_group = c10::make_intrusive<c10d::ProcessGroup>(store, place.rank, place.size);
  group.process_group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                                  group.gloo);
  group.process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  group.process_group->setGroupName("workers");
  return group;
}
