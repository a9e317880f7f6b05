// What a region costs: checkpointed - (plain forward + backward + one more forward), for chains of
// regions of `sin` on one element, beside Python's torch.utils.checkpoint. See METHOD.md.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <dlfcn.h>
#include <remat/checkpoint.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "bench/peer.h"

namespace {

using bench::Clock;

enum class Kind { Sin, Forward, Plain, Checkpointed };
constexpr const char* kind_names[] = {"sin", "forward", "plain", "checkpointed"};

struct Work {
  int64_t regions = 1;
  int64_t ops = 1;
  bool preserve_rng_state = true;

  std::string words(Kind kind) const {
    return std::string(kind_names[static_cast<int>(kind)]) + ' ' + std::to_string(regions) + ' ' +
           std::to_string(ops) + (preserve_rng_state ? " 1" : " 0");
  }
};

at::Tensor leaf() { return at::full({1}, 0.5).requires_grad_(); }

/// The work itself, in C++.
class Chain {
 public:
  explicit Chain(const Work& work) : work_(work) {
    options_.preserve_rng_state = work.preserve_rng_state;
  }

  void run(Kind kind, at::Tensor& x) const {
    const auto region = [ops = work_.ops](at::Tensor y) {
      for (int64_t i = 0; i < ops; ++i) y = at::sin(y);
      return y;
    };
    if (kind == Kind::Sin) {
      at::sin(x);
      return;
    }
    at::Tensor y = x;
    if (kind == Kind::Checkpointed) {
      for (int64_t i = 0; i < work_.regions; ++i)
        y = work_.preserve_rng_state ? remat::checkpoint(region, y)
                                     : remat::checkpoint(options_, region, y);
    } else {
      for (int64_t i = 0; i < work_.regions; ++i) y = region(y);
    }
    if (kind == Kind::Forward) return;
    x.mutable_grad() = at::Tensor();
    y.backward();
  }

 private:
  Work work_;
  remat::CheckpointOptions options_;
};

/// One that does the work: this process, or the Python peer.
class Side {
 public:
  explicit Side(std::string name) : name(std::move(name)) {}
  virtual ~Side() = default;
  virtual double gradient(Kind kind, const Work& work) = 0;
  virtual int64_t sample(Kind kind, const Work& work, Clock clock, int64_t repeats) = 0;
  const std::string name;
};

class Remat final : public Side {
 public:
  Remat() : Side("remat") {}

  double gradient(Kind kind, const Work& work) override {
    at::Tensor x = leaf();
    Chain(work).run(kind, x);
    return x.grad().item<double>();
  }

  int64_t sample(Kind kind, const Work& work, Clock clock, int64_t repeats) override {
    const Chain chain(work);
    at::Tensor x = leaf();
    chain.run(kind, x);
    const int64_t begin = bench::now_ns(clock);
    for (int64_t i = 0; i < repeats; ++i) chain.run(kind, x);
    return bench::now_ns(clock) - begin;
  }
};

class Python final : public Side {
 public:
  explicit Python(const std::vector<std::string>& command) : Side("python"), peer_(command) {
    // Both sides on one LibTorch, or the comparison says nothing.
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&at::set_num_threads), &info);
    const auto ours = std::filesystem::canonical(info.dli_fname).parent_path().string();
    const std::string theirs = peer_.ask("version");
    if (theirs.substr(theirs.find(' ') + 1) != ours)
      throw std::runtime_error("the peer's torch is another one: " + theirs + ", not " + ours);
  }

  double gradient(Kind kind, const Work& work) override {
    return std::strtod(peer_.ask("gradient " + work.words(kind)).c_str(), nullptr);
  }

  int64_t sample(Kind kind, const Work& work, Clock clock, int64_t repeats) override {
    return std::strtoll(
        peer_
            .ask("sample " + work.words(kind) + (clock == Clock::Wall ? " wall " : " thread ") +
                 std::to_string(repeats))
            .c_str(),
        nullptr, 10);
  }

 private:
  bench::Peer peer_;
};

struct Arguments {
  bool smoke = false;
  bool with_peer = true;
  std::string part = "all";
  std::string python = REMAT_BENCH_PYTHON;
  int64_t samples = 15;
  int64_t sample_ns = 50'000'000;
  Clock clock = Clock::Wall;
};

/// One thing that is timed, in all rounds.
struct Cell {
  Side* side;
  Kind kind;
  Work work;
  int64_t repeats = 1;
  std::vector<double> ns{};  ///< a run of the chain, one value a round
};

std::string commit;
std::vector<std::string> table;

template <class... Values>
void row(const char* format, Values... values) {
  char line[256];
  std::snprintf(line, sizeof line, format, values...);
  table.emplace_back(line);
}

void print(const std::string& side, const std::string& kind, const Work& work,
           const Arguments& arguments, const bench::Statistics& result) {
  bench::print_json("region_cost",
                    "\"side\": \"" + side + "\", \"kind\": \"" + kind +
                        "\", \"regions\": " + std::to_string(work.regions) +
                        ", \"ops\": " + std::to_string(work.ops) + ", \"preserve_rng_state\": " +
                        (work.preserve_rng_state ? "true" : "false") + ", \"clock\": \"" +
                        (arguments.clock == Clock::Wall ? "wall" : "thread") + '"',
                    result, at::get_num_threads(), commit);
}

/// Times all cells, alternately: one sample of each in every round.
void measure(std::vector<Cell>& cells, const Arguments& arguments) {
  for (Cell& cell : cells)
    cell.repeats = bench::calibrate(
        [&](int64_t repeats) {
          return cell.side->sample(cell.kind, cell.work, arguments.clock, repeats);
        },
        arguments.sample_ns);
  for (int64_t round = 0; round < arguments.samples; ++round)
    for (Cell& cell : cells)
      cell.ns.push_back(static_cast<double>(cell.side->sample(cell.kind, cell.work, arguments.clock,
                                                              cell.repeats)) /
                        static_cast<double>(cell.repeats));
}

/// Of three cells in a row (forward, plain, checkpointed of one work and side): the overhead, in
/// [ns] per `units`. The minimum is the difference of the minima.
bench::Statistics overhead(const Cell* cells, int64_t units) {
  std::vector<double> rounds;
  for (std::size_t i = 0; i < cells[0].ns.size(); ++i)
    rounds.push_back((cells[2].ns[i] - cells[1].ns[i] - cells[0].ns[i]) /
                     static_cast<double>(units));
  bench::Statistics result = bench::statistics(rounds);
  result.min_ns = (bench::statistics(cells[2].ns).min_ns - bench::statistics(cells[1].ns).min_ns -
                   bench::statistics(cells[0].ns).min_ns) /
                  static_cast<double>(units);
  return result;
}

bool verify(const std::vector<Side*>& sides, const std::vector<Work>& works) {
  bool all_right = true;
  for (const Work& work : works) {
    const double expected = sides.front()->gradient(Kind::Plain, work);
    for (Side* side : sides)
      for (const Kind kind : {Kind::Plain, Kind::Checkpointed}) {
        const double found = side->gradient(kind, work);
        if (found == expected && std::isfinite(found)) continue;
        all_right = false;
        std::fprintf(stderr, "WRONG: %s, %s: gradient %a instead of %a\n", side->name.c_str(),
                     work.words(kind).c_str(), found, expected);
      }
  }
  return all_right;
}

constexpr Kind steps[] = {Kind::Forward, Kind::Plain, Kind::Checkpointed};

/// Chains of 20 regions, both sides.
void regions(const std::vector<Side*>& sides, const std::vector<Work>& works,
             const Arguments& arguments) {
  std::vector<Cell> cells;
  for (Side* side : sides) cells.push_back({side, Kind::Sin, {}});
  for (const Work& work : works)
    for (Side* side : sides)
      for (const Kind kind : steps) cells.push_back({side, kind, work});
  measure(cells, arguments);
  for (const Cell& cell : cells)
    print(cell.side->name, kind_names[static_cast<int>(cell.kind)], cell.work, arguments,
          bench::statistics(cell.ns));

  const double sin_ns = bench::statistics(cells[0].ns).min_ns;
  row("sin in grad mode: %.0f ns (C++)", sin_ns);
  row("%-44s %10s %10s %10s %14s", "overhead per region [ns]", "remat", "in sin", "python",
      "python/remat");
  std::vector<double> ours;
  const Cell* cell = cells.data() + sides.size();
  for (const Work& work : works) {
    bench::Statistics results[2];
    for (std::size_t s = 0; s < sides.size(); ++s, cell += 3) {
      results[s] = overhead(cell, work.regions);
      print(sides[s]->name, "overhead per region", work, arguments, results[s]);
    }
    ours.push_back(results[0].min_ns);
    const std::string label = std::to_string(work.ops) +
                              (work.ops == 1 ? " operator" : " operators") +
                              (work.preserve_rng_state ? "" : ", preserve_rng_state = false");
    row("%-44s %10.0f %10.2f %10.0f %14.1f", label.c_str(), results[0].min_ns,
        results[0].min_ns / sin_ns, results[1].min_ns, results[1].min_ns / results[0].min_ns);
    row("%-44s %10.0f %10s %10.0f %14.1f", "    median", results[0].median_ns, "",
        results[1].median_ns, results[1].median_ns / results[0].median_ns);
  }
  // Two points make a line: what a region costs, and what each tensor saved in it costs.
  for (std::size_t i = 0; i + 1 < works.size(); i += 2) {
    const double per_tensor =
        (ours[i + 1] - ours[i]) / static_cast<double>(works[i + 1].ops - works[i].ops);
    const double per_region = ours[i] - per_tensor * static_cast<double>(works[i].ops);
    row("in units of sin%s: %.2f per region + %.2f per saved tensor",
        works[i].preserve_rng_state ? "" : ", preserve_rng_state = false", per_region / sin_ns,
        per_tensor / sin_ns);
  }
}

/// Growing works on this side: the cost per unit should stay.
void scale(Side* side, const char* unit, const std::vector<Work>& works,
           const Arguments& arguments) {
  std::vector<Cell> cells;
  for (const Work& work : works)
    for (const Kind kind : steps) cells.push_back({side, kind, work});
  measure(cells, arguments);
  row("%-44s %10s %10s %14s %14s", (std::string("overhead per ") + unit + " [ns]").c_str(), "min",
      "median", "plain step", "of plain+fwd");
  const Cell* cell = cells.data();
  for (const Work& work : works) {
    for (std::size_t i = 0; i < std::size(steps); ++i)
      print(side->name, kind_names[static_cast<int>(cell[i].kind)], work, arguments,
            bench::statistics(cell[i].ns));
    const bench::Statistics result = overhead(cell, work.regions * work.ops);
    print(side->name, std::string("overhead per ") + unit, work, arguments, result);
    const std::string label =
        std::to_string(work.regions) + " regions of " + std::to_string(work.ops);
    const double forward = bench::statistics(cell[0].ns).min_ns;
    const double plain = bench::statistics(cell[1].ns).min_ns;
    row("%-44s %10.0f %10.0f %14.0f %14.3f", label.c_str(), result.min_ns, result.median_ns,
        plain / static_cast<double>(work.regions * work.ops),
        bench::statistics(cell[2].ns).min_ns / (forward + plain));
    cell += 3;
  }
}

Arguments parse(int argc, char** argv) {
  Arguments result;
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
    } else if (word == "--part") {
      result.part = value();
    } else if (word == "--python") {
      result.python = value();
    } else if (word == "--samples") {
      result.samples = std::stoll(value());
    } else if (word == "--sample-ms") {
      result.sample_ns = std::stoll(value()) * 1'000'000;
    } else if (word == "--clock") {
      result.clock = value() == "thread" ? Clock::Thread : Clock::Wall;
    } else {
      throw std::runtime_error(
          "usage: region_cost [--smoke] [--no-peer] [--part regions|chain|saved] [--python PYTHON] "
          "[--samples N] [--sample-ms MS] [--clock wall|thread]");
    }
  }
  return result;
}

int run(const Arguments& arguments) {
  at::set_num_threads(1);
  const std::filesystem::path folder = REMAT_BENCH_FOLDER;
  commit = bench::output_of("git -C '" + folder.string() + "' describe --always --dirty");
  const auto wants = [&](const char* part) {
    return arguments.part == "all" || arguments.part == part;
  };

  Remat remat;
  std::optional<Python> python;
  if (arguments.with_peer && wants("regions"))
    python.emplace(std::vector<std::string>{arguments.python, folder / "region_cost.py"});
  std::vector<Side*> sides{&remat};
  if (python) sides.push_back(&*python);

  const std::vector<Work> both{{20, 1}, {20, 10}, {20, 1, false}, {20, 10, false}};
  std::vector<Work> chains{{100, 1}, {1'000, 1}, {10'000, 1}, {100'000, 1}};
  std::vector<Work> saves{{1, 100}, {1, 1'000}, {1, 10'000}};
  bool all_right = true;
  if (wants("regions")) all_right &= verify(sides, both);
  if (wants("chain")) all_right &= verify({&remat}, chains);
  if (wants("saved")) all_right &= verify({&remat}, saves);
  std::fprintf(stderr, "gradients %s\n", all_right ? "equal those of plain autograd" : "are WRONG");
  if (!all_right || arguments.smoke) return all_right ? 0 : 1;

  if (wants("regions")) regions(sides, both, arguments);
  if (wants("chain")) scale(&remat, "region", chains, arguments);
  if (wants("saved")) scale(&remat, "saved tensor", saves, arguments);
  std::fprintf(stderr, "\n");
  for (const auto& line : table) std::fprintf(stderr, "%s\n", line.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "region_cost: %s\n", error.what());
    return 1;
  }
}
