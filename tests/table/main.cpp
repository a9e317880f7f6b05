// The table of functions, configurations and modes. Each cell must have the same results with
// regions as without.
//
//   table                               every cell
//   table --seconds N [--from SEED]     cells and numbers drawn at random by seeds from SEED on;
//         [--configuration PATTERN]     only of configurations that match
//   table --only FUNCTION[/CONFIGURATION[/MODE]] [--from SEED]
//   table --list                        the parts of the table, its exceptions and their reasons
//   table --notices                     configurations that are wrong on purpose: all must be found
// A disagreement is printed as a block; then the exit status is 1. The last line is always "N
// triples, M disagreements".

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fnmatch.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>

#include "remat/report.h"
#include "tests/table/table.h"

namespace {

using Clock = std::chrono::steady_clock;
using table::Cell;

constexpr int seconds_for_a_cell = 60;

/// Silences warnings: functions that LibTorch warns about are in the table on purpose.
class Silence : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

char running[200] = "nothing";
volatile unsigned long num_cells = 0;
unsigned long num_disagreements = 0;

/// Prints the cell that ended the process, which would otherwise remain unknown.
void die(int signal) {
  char text[400];
  const int length = std::snprintf(
      text, sizeof text, "%s (signal %d): %s\n%lu triples, %lu disagreements\n",
      signal == SIGALRM ? "hung" : "crashed", signal, running, num_cells, num_disagreements + 1);
  [[maybe_unused]] const auto written = write(STDOUT_FILENO, text, static_cast<size_t>(length));
  _exit(1);
}

void run(const Cell& cell) {
  if (is_skipped(cell)) return;
  num_cells = num_cells + 1;
  std::snprintf(running, sizeof running, "%s, seed %llu", cell.name().c_str(),
                static_cast<unsigned long long>(cell.seed));
  alarm(seconds_for_a_cell);
  const std::string text = disagreement(cell);
  alarm(0);
  if (text.empty()) return;
  ++num_disagreements;
  std::cout << cell.name() << ", seed " << cell.seed << "\n" << text << "\n" << std::endl;
}

void run_all(const std::string& function, const std::string& configuration, const std::string& mode,
             uint64_t seed) {
  auto is_wanted = [](const std::string& wanted, const std::string& name) {
    return wanted.empty() || wanted == name;
  };
  for (const table::Function& f : table::functions())
    for (const table::Mode& m : table::modes())
      for (const table::Configuration& c : table::configurations())
        if (is_wanted(function, f.name) && is_wanted(configuration, c.name) &&
            is_wanted(mode, m.name))
          run({f, c, m, seed});
}

void run_at_random(int seconds, uint64_t seed, const std::string& pattern) {
  std::vector<table::Configuration> wanted;
  for (const table::Configuration& each : table::configurations())
    if (fnmatch(pattern.c_str(), each.name.c_str(), 0) == 0) wanted.push_back(each);
  if (wanted.empty()) return;
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  for (; Clock::now() < end; ++seed) {
    std::mt19937_64 engine(seed);
    auto one_of = [&engine](const auto& all) -> const auto& { return all[engine() % all.size()]; };
    const table::Function& function = one_of(table::functions());
    const table::Configuration& configuration = one_of(wanted);
    run({function, configuration, one_of(table::modes()), seed});
  }
}

/// Each configuration must be detected in at least one cell; most are in nearly all.
void run_broken() {
  for (const table::Configuration& configuration : table::broken_configurations()) {
    unsigned long noticed = 0, cells = 0;
    for (const table::Function& f : table::functions())
      for (const table::Mode& m : table::modes()) {
        const Cell cell{f, configuration, m, 1};
        if (is_skipped(cell)) continue;
        ++cells;
        noticed += disagreement(cell).empty() ? 0 : 1;
      }
    std::cout << configuration.name << ": noticed in " << noticed << " of " << cells << " cells\n";
    num_cells = num_cells + cells;
    num_disagreements += noticed == 0 ? 1 : 0;
  }
}

const char* kind_of(const table::Exception& exception) {
  using Kind = table::Exception::Kind;
  switch (exception.kind) {
    case Kind::Skipped:
      return "is not run";
    case Kind::MayRaise:
      return "may raise";
    case Kind::NotRaised:
      return "may give the right gradient where plain raises";
    case Kind::Versions:
      return "may differ in versions";
  }
  return "";
}

void print(const table::Exception& exception, const std::string& of) {
  std::cout << "  " << of << "/" << exception.where << " " << kind_of(exception);
  if (!exception.error.empty()) std::cout << " \"" << exception.error << "\"";
  std::cout << ": " << exception.reason;
  if (exception.cells > 0)
    std::cout << " [" << exception.needed << " of " << exception.cells << "]";
  std::cout << "\n";
}

void print_exceptions() {
  std::cout << "exceptions [cells that needed them, of those that they speak of]:\n";
  for (const table::Function& function : table::functions())
    for (const table::Exception& exception : function.exceptions) print(exception, function.name);
  for (const table::Exception& exception : table::shared_exceptions())
    print(exception, exception.traits == 0 ? "*" : "(some)");
}

template <class Rows>
void print_names(const char* what, const Rows& rows) {
  std::cout << rows.size() << " " << what << ":";
  for (const auto& row : rows) std::cout << " " << row.name;
  std::cout << "\n";
}

int usage() {
  std::cerr << "table [--seconds N [--configuration PATTERN]] [--from SEED] [--only "
               "FUNCTION[/CONFIGURATION[/MODE]]]\n"
               "      [--list] [--notices]\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = 1;
  int seconds = 0;
  bool only_list = false, only_broken = false;
  std::string parts[3], pattern = "*";
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--list") {
      only_list = true;
    } else if (name == "--notices") {
      only_broken = true;
    } else if (i + 1 == argc) {
      return usage();
    } else if (name == "--seconds") {
      seconds = std::atoi(argv[++i]);
    } else if (name == "--from") {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (name == "--configuration") {
      pattern = argv[++i];
    } else if (name == "--only") {
      std::string rest = argv[++i];
      for (std::string& part : parts) {
        const std::size_t slash = rest.find('/');
        part = rest.substr(0, slash);
        rest = slash == std::string::npos ? "" : rest.substr(slash + 1);
      }
    } else {
      return usage();
    }
  }
  at::set_num_threads(1);
  // MKL rounds differently on threads that it may give helpers. It reads the variable when it is
  // loaded.
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    setenv("OMP_NUM_THREADS", "1", /*overwrite=*/1);
    execv("/proc/self/exe", argv);
  }
  static Silence silence;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silence);
  // The profiling executor saves other tensors in a function's first runs than in later ones: a
  // known limit.
  torch::jit::getProfilingMode() = false;
  for (const int signal : {SIGSEGV, SIGABRT, SIGALRM, SIGBUS, SIGFPE}) std::signal(signal, die);
  if (only_list) {
    print_names("functions", table::functions());
    print_names("configurations", table::configurations());
    print_names("modes", table::modes());
    for (const table::Function& f : table::functions())
      for (const table::Configuration& c : table::configurations())
        for (const table::Mode& m : table::modes()) {
          const Cell cell{f, c, m, seed};
          for (const table::Exception* exception : exceptions_of(cell)) ++exception->cells;
          if (!is_skipped(cell)) num_cells = num_cells + 1;
        }
  } else if (only_broken) {
    run_broken();
  } else if (seconds > 0) {
    run_at_random(seconds, seed, pattern);
  } else {
    run_all(parts[0], parts[1], parts[2], seed);
  }
  if (only_list || seconds == 0) print_exceptions();
  const remat::Counters done = remat::counters();
  std::cout << done.frames_created << " regions, " << done.recomputes << " recomputes, "
            << done.tensors_dropped << " tensors dropped\n"
            << num_cells << " triples, " << num_disagreements << " disagreements" << std::endl;
  return num_disagreements == 0 ? 0 : 1;
}
