#pragma once
// Which of the program's processes this one is, from the command line.

#include <sys/types.h>

#include <cstdint>
#include <stdexcept>
#include <string>

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Place {
  int rank = -1;       // of a worker, in [0, size); -1: the process that starts them
  int size = 2;        // the number of workers
  uint16_t port = 0;   // of the store, on this machine
  pid_t leader = 0;    // the process that started this worker
  bool helps = false;  // asked for its usage only
};

inline long parse_number(const std::string& name, const std::string& text, long least, long most) {
  size_t used = 0;
  long number = 0;
  try {
    number = std::stol(text, &used);
  } catch (const std::exception&) {
    used = std::string::npos;
  }
  if (used != text.size() || number < least || number > most)
    throw UsageError(name + " needs a number from " + std::to_string(least) + " to " +
                     std::to_string(most) + ", got '" + text + "'");
  return number;
}

inline Place parse_place(int argc, char** argv) {
  Place place;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto number = [&](long least, long most) {
      if (i + 1 >= argc) throw UsageError(name + " needs a value");
      return parse_number(name, argv[++i], least, most);
    };
    if (name == "--processes") {
      place.size = static_cast<int>(number(1, 16));
    } else if (name == "--rank") {
      place.rank = static_cast<int>(number(0, 15));
    } else if (name == "--port") {
      place.port = static_cast<uint16_t>(number(1, 65535));
    } else if (name == "--leader") {
      place.leader = static_cast<pid_t>(number(1, 1L << 30));
    } else if (name == "--help" || name == "-h") {
      place.helps = true;
    } else {
      throw UsageError("unknown option '" + name + "'");
    }
  }
  return place;
}
