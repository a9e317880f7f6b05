#pragma once
// Which of the program's processes this one is, from the command line.

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "../command_line.h"

struct Place {
  int rank = -1;      // of a worker, in [0, size); -1: the process that starts them
  int size = 2;       // the number of workers
  uint16_t port = 0;  // of the store, on this machine
  pid_t leader = 0;   // the process that started this worker
};

inline Place parse_place(int argc, char** argv) {
  Place place;
  parse_options(argc, argv, [&](const std::string& name, const auto& value) {
    if (name == "--processes") {
      place.size = parse_number(name, value(), 1, 16);
    } else if (name == "--rank") {
      place.rank = parse_number(name, value(), 0, 15);
    } else if (name == "--port") {
      place.port = static_cast<uint16_t>(parse_number(name, value(), 1, 65535));
    } else if (name == "--leader") {
      place.leader = parse_number<pid_t>(name, value(), 1, 1 << 30);
    } else {
      return false;
    }
    return true;
  });
  return place;
}
