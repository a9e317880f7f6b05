#pragma once
// The words of the command line that benchmarks share.

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>

#include "bench/measure.h"

namespace bench {

struct Arguments {
  bool smoke = false;
  bool with_peer = true;  ///< other programs take part
  int64_t samples = 15;
  int64_t sample_ns = 50'000'000;
  Clock clock = Clock::Wall;
  std::string commit{};

  /// A member of a JSON line's params.
  std::string clock_member() const {
    return std::string("\"clock\": \"") + (clock == Clock::Wall ? "wall" : "thread") + '"';
  }
};

/// Takes the next word of the command line.
using NextWord = std::function<std::string()>;

/// `own` takes a word that only one program knows and returns true; `own_usage` names those words.
inline Arguments parse(
    int argc, char** argv, const std::string& own_usage = {},
    const std::function<bool(const std::string& word, const NextWord& value)>& own = {}) {
  Arguments result;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const NextWord value = [&] {
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
    } else if (word == "--clock") {
      result.clock = value() == "thread" ? Clock::Thread : Clock::Wall;
    } else if (!own || !own(word, value)) {
      throw std::runtime_error("usage: " + std::filesystem::path(argv[0]).filename().string() +
                               " [--smoke] [--samples N] [--sample-ms MS] [--clock wall|thread]" +
                               own_usage);
    }
  }
  result.commit = output_of("git -C '" + std::filesystem::path(REMAT_BENCH_FOLDER).string() +
                            "' describe --always --dirty");
  return result;
}

}  // namespace bench
