#pragma once
// The process's number among those of the program, and its device, from the command line.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../command_line.h"
#include "../target.h"

struct Place {
  int rank = -1;      // of a worker, in [0, size); -1: the process that starts them
  int size = 2;       // the number of workers
  uint16_t port = 0;  // of the store, on this machine
  pid_t leader = 0;   // the process that started this worker
  Target target{.dtype = torch::kDouble, .has_float64 = true};
  std::string device_name = "cpu";

  // Returns the words that a worker's command line needs.
  std::vector<std::string> words() const {
    return {"--processes", std::to_string(size), "--device", device_name,
            "--dtype",     target.dtype_name()};
  }
};

inline Place parse_place(int argc, char** argv) {
  Place place;
  parse_options(argc, argv, [&](const std::string& name, const auto& value) {
    if (name == "--device") {
      place.device_name = value();
    } else if (name == "--processes") {
      place.size = parse_number(name, value(), 1, 16);
    } else if (name == "--rank") {
      place.rank = parse_number(name, value(), 0, 15);
    } else if (name == "--port") {
      place.port = static_cast<uint16_t>(parse_number(name, value(), 1, 65535));
    } else if (name == "--leader") {
      place.leader = parse_number<pid_t>(name, value(), 1, 1 << 30);
    } else {
      return place.target.take(name, value);
    }
    return true;
  });
  place.target.device = usable_device(place.device_name);
  // Each process gets a device of its own, if there are enough and the command line names none.
  if (place.rank > 0 && !torch::Device(place.device_name).has_index()) {
    const auto type = place.target.device.type();
    const int count = type == torch::kCPU ? 1 : c10::impl::VirtualGuardImpl(type).deviceCount();
    if (count > 1)
      place.target.device =
          torch::Device(type, static_cast<torch::DeviceIndex>(place.rank % count));
    if (count > 1) c10::impl::VirtualGuardImpl(type).setDevice(place.target.device);
  }
  return place;
}
