#pragma once
// The main function of a benchmark: words of the command line, and the end with an error.

#include <ATen/Parallel.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "examples/device.h"

namespace bench {

/// The clock of samples. Wall: the wall's time. The others are time on cores, which a busy machine
/// disturbs less. Thread: of this thread, for work that one thread does alone. Process: of all
/// threads of the process, for the host's part of work on a device, whose backward runs on another
/// thread.
enum class Clock { Wall, Thread, Process };

struct Arguments {
  bool smoke = false;
  bool with_peer = true;  ///< other programs take part
  int64_t samples = 15;
  int64_t sample_ns = 50'000'000;
  Clock clock = Clock::Wall;
  at::Device device = at::kCPU;  ///< where the work runs; with an index, unless it is the CPU
  std::string commit{};
};

/// A word of the command line that one program alone knows, with the name of its value ("--threads
/// N"), and the variable for that value.
using OwnWord = std::pair<std::string, std::string*>;

/// Returns the first line that a command prints; empty if the command fails.
inline std::string output_of(const std::string& command) {
  std::string line;
  if (FILE* const pipe = popen((command + " 2>/dev/null").c_str(), "r")) {
    char buffer[256];
    if (std::fgets(buffer, sizeof buffer, pipe) != nullptr) line = buffer;
    pclose(pipe);
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return line;
}

/// The devices on which the work of a program can run.
enum class RunsOn { Cpu, AnyDevice };

inline Arguments parse(int argc, char** argv, const std::vector<OwnWord>& own = {},
                       RunsOn where = RunsOn::Cpu) {
  Arguments result;
  std::string usage = "usage: " + std::filesystem::path(argv[0]).filename().string() +
                      " [--smoke] [--samples N] [--sample-ms MS] [--clock wall|thread|process]";
  if (where == RunsOn::AnyDevice) usage += " [--device NAME]";
  for (const auto& [word, place] : own) usage += " [" + word + "]";
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] {
      if (++i == argc) throw std::runtime_error(word + " needs a value");
      return std::string(argv[i]);
    };
    if (word == "--smoke") {
      result.smoke = true;
    } else if (word == "--no-peer") {
      result.with_peer = false;
    } else if (word == "--samples") {
      result.samples = std::stoll(value());
    } else if (word == "--sample-ms") {
      result.sample_ns = std::stoll(value()) * 1'000'000;
    } else if (word == "--device") {
      result.device = usable_device(value());
      if (where == RunsOn::Cpu && !result.device.is_cpu())
        throw std::runtime_error(std::filesystem::path(argv[0]).filename().string() +
                                 " measures on the CPU only. Hint: leave out --device.");
    } else if (word == "--clock") {
      const std::string clock = value();
      result.clock = clock == "thread"    ? Clock::Thread
                     : clock == "process" ? Clock::Process
                                          : Clock::Wall;
    } else {
      bool is_known = false;
      for (const auto& [name, place] : own)
        if (name.substr(0, name.find(' ')) == word) *place = value(), is_known = true;
      if (!is_known) throw std::runtime_error(usage);
    }
  }
  if (!result.device.is_cpu() && result.clock == Clock::Thread)
    throw std::runtime_error("--clock thread says nothing of work on " + result.device.str());
  result.commit = output_of("git -C '" + std::filesystem::path(REMAT_BENCH_FOLDER).string() +
                            "' describe --always --dirty");
  return result;
}

/// Runs the main function of a benchmark, in one thread unless `run` sets more. Returns the exit
/// status.
inline int main_of(int (*run)(int argc, char** argv), int argc, char** argv) {
  try {
    at::set_num_threads(1);
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace bench
