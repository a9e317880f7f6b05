#pragma once
// A program of several processes: the first starts the others, which are the same program.

#include <torch/torch.h>

#include <functional>
#include <string>

#include "place.h"
#include "store.h"
#include "workers.h"

struct Program {
  std::string name;
  // In each worker; what it throws fails the whole program.
  std::function<void(const Place&, const Store&)> work;
  // In the first process when all workers have ended well: compares what they told; whether all is
  // as promised.
  std::function<bool(const Place&, const Store&)> judge;
};

// The exit status: 0 if all is as promised, 1 if not, 2 if it was called wrongly or failed.
inline int run(const Program& program, int argc, char** argv) {
  const std::string usage = "usage: " + program.name + " [--processes N]\n";
  std::string who = program.name;  // a worker adds its rank
  return run_example(who, usage, argc, argv, [&] {
    const Place place = parse_place(argc, argv);
    // The processes share the machine; and sums in one thread have one order.
    torch::set_num_threads(1);
    if (place.rank >= 0) {
      Workers::follow(place.leader);
      who += ", process " + std::to_string(place.rank);
      program.work(place, connect_store(place.port));
      return 0;
    }
    uint16_t port = 0;
    const Store store = serve_store(port);
    Workers workers(place.size, port);
    workers.wait(std::chrono::seconds(180));
    return program.judge(place, store) ? 0 : 1;
  });
}
