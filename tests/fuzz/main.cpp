// Differential fuzzing: random programs must have the same results with regions as without.
//
//   fuzz --seeds A:B               the programs of the seeds in [A, B)
//   fuzz --seconds N [--from A]    the programs from A (default 0) on, for N seconds
//   fuzz --seed S [--print]        one program; with --print its text only
// Options add topics to the programs:
//
//   --selective    policies, names, pin and save_region
//   --arguments    other uses of arguments: writes, looks at properties, hooks, other storages
//   --copies       most regions keep copies of their arguments
//   --moves        most hooks are guards that move saved tensors; regions move their inputs
//   --modules      calls of modules whose forward writes to buffers
//   --budgets      no regions; the programs run within byte budgets
//   --waits        functions take gradients, read saved tensors of nodes, then write to arguments
// With --device cuda the programs run there. A finding is shrunk (on the CPU) and printed, and the
// exit status is 1. With --first the first finding ends the run, and only its seed and kind are
// printed. Findings of tests/fuzz/known.txt are reported as known; --known runs those alone. The
// last line is always "N programs, M findings".

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <iterator>
#include <optional>
#include <utility>

#include "tests/fuzz/budgets.h"
#include "tests/fuzz/known.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int seconds_for_a_program = 60;
constexpr int seconds_to_shrink = 60;
constexpr int max_findings = 10;

volatile unsigned long long running_seed = 0, num_programs = 0;
fuzz::Topics topics;
bool has_budgets = false;

struct TopicFlag {
  const char* name;
  bool* is_on;
};
const TopicFlag topic_flags[] = {
    {"--arguments", &topics.arguments}, {"--budgets", &has_budgets},
    {"--copies", &topics.copies},       {"--modules", &topics.modules},
    {"--moves", &topics.moves},         {"--selective", &topics.selective},
    {"--waits", &topics.waits}};

/// The topics on the command line, which are sorted.
std::vector<std::string> topics_asked;
uint64_t num_known = 0;

std::optional<fuzz::Finding> look_at(const fuzz::Program& program) {
  return has_budgets ? fuzz::check_budgets(program) : fuzz::check(program);
}

/// Prints the program that ended the process, which would otherwise remain unknown.
void die(int signal) {
  char text[160];
  const int length =
      std::snprintf(text, sizeof text, "%s (signal %d) at seed %llu\n%llu programs, 1 findings\n",
                    signal == SIGALRM ? "hung" : "crashed", signal, running_seed, num_programs);
  [[maybe_unused]] const auto written = write(STDOUT_FILENO, text, static_cast<size_t>(length));
  _exit(1);
}

/// Returns the finding of a program in a process of its own, since a candidate may crash or hang.
std::string kind_in_child(const fuzz::Program& program) {
  int ends[2];
  if (pipe(ends) != 0) return "";
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    for (const int signal : {SIGSEGV, SIGABRT, SIGALRM, SIGBUS}) std::signal(signal, SIG_DFL);
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDERR_FILENO);
    alarm(10);
    const auto found = look_at(program);
    if (found) [[maybe_unused]]
      const auto written = write(ends[1], found->kind.data(), found->kind.size());
    _exit(0);
  }
  close(ends[1]);
  std::string kind;
  char buffer[256];
  for (ssize_t n = 0; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
    kind.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : kind;
}

fuzz::Program shrink(fuzz::Program program, const std::string& kind) {
  const auto end = Clock::now() + std::chrono::seconds(seconds_to_shrink);
  for (bool is_smaller = true; is_smaller;) {
    is_smaller = false;
    for (fuzz::Program& candidate : fuzz::smaller(program)) {
      if (Clock::now() > end) return program;
      if (kind_in_child(candidate) != kind) continue;
      program = std::move(candidate);
      is_smaller = true;
      break;
    }
  }
  return program;
}

/// Returns whether the program of this seed agrees; otherwise prints the finding, shrunk first.
bool agrees(uint64_t seed, bool shrinks) {
  running_seed = seed;
  alarm(seconds_for_a_program);
  const fuzz::Program program = fuzz::generate(seed, topics);
  const auto found = look_at(program);
  alarm(0);
  if (!found) return true;
  if (const std::string known = fuzz::known_text(topics_asked, seed); !known.empty()) {
    ++num_known;
    std::cout << "seed " << seed << ": known: " << known << std::endl;
    return true;
  }
  if (!shrinks || !fuzz::device().is_cpu()) {  // a process that uses an accelerator cannot fork
    if (shrinks) std::cout << fuzz::to_text(program) << found->text << "\n";
    std::cout << "seed " << seed << ": " << found->kind << std::endl;
    return false;
  }
  std::cout << "seed " << seed << ": " << found->text << "\nshrinking ..." << std::endl;
  const fuzz::Program small = shrink(program, found->kind);
  const auto finding = look_at(small);
  std::cout << fuzz::to_text(small) << (finding ? finding->text : found->text) << "\n" << std::endl;
  return false;
}

void set_topics(const std::vector<std::string>& names) {
  topics_asked = names;
  for (const TopicFlag& flag : topic_flags)
    *flag.is_on = std::find(names.begin(), names.end(), flag.name) != names.end();
  topics.arguments |= topics.waits;
}

/// Runs each known finding, and prints those that agree by now.
int run_known() {
  uint64_t mended = 0, open = 0;
  for (const fuzz::KnownFinding& each : fuzz::known_findings()) {
    set_topics(each.topics);
    for (const uint64_t seed : each.seeds) {
      running_seed = seed;
      const bool is_open = look_at(fuzz::generate(seed, topics)).has_value();
      ++(is_open ? open : mended);
      std::string names;
      for (const std::string& name : each.topics) names += name + " ";
      std::cout << names << seed << (is_open ? ": open: " : ": mended: ") << each.text << std::endl;
    }
  }
  std::cout << open << " open, " << mended << " mended\n";
  return 0;
}

int usage() {
  std::cerr << "fuzz --seeds A:B | --seconds N [--from A] | --seed S [--print] | --known\n"
               "     [--selective]\n"
               "     [--arguments] [--copies] [--moves] [--modules] [--waits] [--budgets]\n"
               "     [--first]\n"
               "     [--device cuda]\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t first = 0, last = 0;
  long seconds = -1;
  bool only_print = false, in_child = false, only_first = false;
  bool runs_known = false;
  const TopicFlag flags[] = {{"--print", &only_print},
                             {"--first", &only_first},
                             {"--shrink", &in_child},
                             {"--known", &runs_known}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto is_this = [&](const TopicFlag& each) { return name == each.name; };
    if (const auto* const flag = std::find_if(std::begin(flags), std::end(flags), is_this);
        flag != std::end(flags)) {
      *flag->is_on = true;
      continue;
    }
    if (std::any_of(std::begin(topic_flags), std::end(topic_flags), is_this)) {
      topics_asked.push_back(name);
      continue;
    }
    if (i + 1 == argc) return usage();
    const char* value = argv[++i];
    if (name == "--device") {
      const at::Device where{std::string(value)};
      fuzz::device() = at::Device(where.type(), where.has_index() ? where.index() : 0);
      at::ones({1}, at::TensorOptions(fuzz::device()));  // its allocator counts from its first use
      at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
      c10::WarningUtils::set_warnAlways(false);
      continue;
    }
    char* end = nullptr;
    const uint64_t number = std::strtoull(value, &end, 10);
    if (name == "--seeds" && *end == ':') {
      first = number;
      last = std::strtoull(end + 1, nullptr, 10);
    } else if (name == "--seed") {
      first = number;
      last = number + 1;
    } else if (name == "--seconds") {
      seconds = static_cast<long>(number);
      last = UINT64_MAX;
    } else if (name == "--from") {
      first = number;
    } else {
      return usage();
    }
  }
  std::sort(topics_asked.begin(), topics_asked.end());
  set_topics(std::vector<std::string>(topics_asked));
  if (runs_known) return run_known();
  if (last == 0) return usage();
  if (only_print) {
    for (uint64_t seed = first; seed < last; ++seed)
      std::cout << fuzz::to_text(fuzz::generate(seed, topics)) << "\n";
    return 0;
  }
  at::set_num_threads(1);
  if (in_child) {  // the seed ends the process, so each try of the shrinking gets a process
    const fuzz::Program program = fuzz::generate(first, topics);
    const std::string kind = kind_in_child(program);
    std::cout << "seed " << first << ": " << kind << "\n";
    if (!kind.empty()) std::cout << fuzz::to_text(shrink(program, kind));
    std::cout << "1 programs, " << !kind.empty() << " findings\n";
    return kind.empty() ? 0 : 1;
  }
  for (const int signal : {SIGSEGV, SIGABRT, SIGALRM, SIGBUS}) std::signal(signal, die);
  const auto start = Clock::now();
  const uint64_t most = only_first ? 1 : max_findings;
  uint64_t findings = 0;
  for (uint64_t seed = first; seed < last && findings < most; ++seed) {
    if (seconds >= 0 && Clock::now() - start > std::chrono::seconds(seconds)) break;
    num_programs = num_programs + 1;
    findings += !agrees(seed, !only_first);
  }
  if (num_known > 0) std::cout << num_known << " known findings\n";
  std::cout << num_programs << " programs, " << findings << " findings" << std::endl;
  return findings == 0 ? 0 : 1;
}
