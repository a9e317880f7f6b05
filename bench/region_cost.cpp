// Measures a region: checkpointed - (plain forward + backward + one more forward), for chains of
// regions of `sin` on one element. Compares with Python's torch.utils.checkpoint, and with the
// re-entrant Function that C++ programs use today. See METHOD.md.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sin.h>
#include <dlfcn.h>
#include <remat/checkpoint.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/measure.h"
#include "bench/peer.h"
#include "bench/rounds.h"

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

at::Tensor leaf(const at::Device& device) {
  return at::full({1}, 0.5, at::TensorOptions(device)).requires_grad_();
}

/// The computation of a region.
struct Sines {
  int64_t ops;
  at::Tensor operator()(at::Tensor y) const {
    for (int64_t i = 0; i < ops; ++i) y = at::sin(y);
    return y;
  }
};

/// A region of this process.
using Region = at::Tensor (*)(const Work& work, const at::Tensor& x);

const remat::CheckpointOptions without_rng{.preserve_rng_state = false};

at::Tensor remat_region(const Work& work, const at::Tensor& x) {
  return work.preserve_rng_state ? remat::checkpoint(Sines{work.ops}, x)
                                 : remat::checkpoint(without_rng, Sines{work.ops}, x);
}

/// Runs forward without grad mode, and a backward inside the backward. It keeps one input, cannot
/// nest cheaply, and torch::autograd::grad does not work through it.
class ReentrantFunction : public torch::autograd::Function<ReentrantFunction> {
 public:
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  // Function::apply has grad mode off around forward.
  static at::Tensor forward(Context* context, const at::Tensor& x, const Sines& sines,
                            bool preserve_rng_state) {
    context->save_for_backward({x});
    context->saved_data["ops"] = sines.ops;
    if (preserve_rng_state)
      context->saved_data["state"] = at::detail::getDefaultCPUGenerator().get_state();
    return sines(x);
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const Sines sines{context->saved_data["ops"].toInt()};
    const auto state = context->saved_data.find("state");
    at::Tensor y;
    {
      const at::AutoGradMode grad_mode(true);
      if (state == context->saved_data.end()) {
        y = sines(x);
      } else {
        at::Generator generator = at::detail::getDefaultCPUGenerator();
        const at::Tensor here = generator.get_state();
        generator.set_state(state->second.toTensor());
        y = sines(x);
        generator.set_state(here);
      }
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor reentrant_region(const Work& work, const at::Tensor& x) {
  return ReentrantFunction::apply(x, Sines{work.ops}, work.preserve_rng_state);
}

/// A side of the comparison: this process, or the Python peer.
class Side {
 public:
  explicit Side(std::string name) : name(std::move(name)) {}
  virtual ~Side() = default;
  virtual double gradient(Kind kind, const Work& work) = 0;
  virtual bench::Cell cell(Kind kind, const Work& work) = 0;
  const std::string name;
};

class InProcess final : public Side {
 public:
  InProcess(std::string name, Region region, const at::Device& device)
      : Side(std::move(name)), region_(region), device_(device) {}

  double gradient(Kind kind, const Work& work) override {
    const at::Tensor x = leaf(device_);
    run(kind, work, x);
    return x.grad().item<double>();
  }

  bench::Cell cell(Kind kind, const Work& work) override {
    return bench::Cell([this, kind, work, x = leaf(device_)] { run(kind, work, x); });
  }

 private:
  void run(Kind kind, const Work& work, const at::Tensor& x) const {
    if (kind == Kind::Sin) {
      at::sin(x);
      return;
    }
    const Sines sines{work.ops};
    at::Tensor y = x;
    for (int64_t i = 0; i < work.regions; ++i)
      y = kind == Kind::Checkpointed ? region_(work, y) : sines(y);
    if (kind == Kind::Forward) return;
    x.mutable_grad() = at::Tensor();
    y.backward();
  }

  const Region region_;
  const at::Device device_;
};

class Python final : public Side {
 public:
  explicit Python(const std::vector<std::string>& command) : Side("python"), peer_(command) {
    // Both sides must use one LibTorch, or the comparison means nothing.
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

  bench::Cell cell(Kind kind, const Work& work) override {
    return bench::Cell([this, words = work.words(kind)](int64_t repeats,
                                                        const bench::Arguments& arguments) {
      std::istringstream answer(peer_.ask("sample " + words +
                                          (arguments.clock == Clock::Wall ? " wall " : " thread ") +
                                          std::to_string(repeats)));
      bench::Sample sample;
      answer >> sample.ns >> sample.host_ns;
      return sample;
    });
  }

 private:
  bench::Peer peer_;
};

using bench::Arguments;
using bench::text;

std::vector<std::string> table;

void print(const std::string& side, const std::string& kind, const Work& work,
           const Arguments& arguments, const bench::Statistics& result,
           const std::string& measured = {}) {
  bench::print_json(
      "region_cost",
      text("\"side\": \"%s\", \"kind\": \"%s\", \"regions\": %lld, \"ops\": %lld, "
           "\"preserve_rng_state\": %s",
           side.c_str(), kind.c_str(), static_cast<long long>(work.regions),
           static_cast<long long>(work.ops), work.preserve_rng_state ? "true" : "false"),
      arguments, result, measured);
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

/// Chains of 20 regions, all sides.
void regions(const std::vector<Side*>& sides, const std::vector<Work>& works,
             const Arguments& arguments) {
  struct Timed {
    Side* side;
    Kind kind;
    Work work;
  };
  std::vector<Timed> timed;
  for (Side* side : sides) timed.push_back({side, Kind::Sin, {}});
  for (const Work& work : works)
    for (Side* side : sides)
      for (const Kind kind : {Kind::Forward, Kind::Plain, Kind::Checkpointed})
        timed.push_back({side, kind, work});
  std::vector<bench::Cell> cells;
  for (const Timed& each : timed) cells.push_back(each.side->cell(each.kind, each.work));
  bench::measure(cells, arguments);
  for (std::size_t i = 0; i < timed.size(); ++i)
    print(timed[i].side->name, kind_names[static_cast<int>(timed[i].kind)], timed[i].work,
          arguments, cells[i].result(), cells[i].host_json(arguments));

  const double sin_ns = cells[0].result().min_ns;
  table.push_back(text("sin in grad mode: %.0f ns (C++)", sin_ns));
  std::string heading = text("%-42s %8s %7s", "overhead per region [ns]", "remat", "in sin");
  for (std::size_t s = 1; s < sides.size(); ++s)
    heading += text(" %11s %8s", sides[s]->name.c_str(), "/ remat");
  table.push_back(heading);
  const auto host_ns = [](const bench::Cell& cell) {
    return bench::statistics(cell.host_ns).min_ns;
  };
  std::vector<double> ours;
  const bench::Cell* cell = cells.data() + sides.size();
  for (const Work& work : works) {
    std::vector<bench::Statistics> results;
    for (std::size_t s = 0; s < sides.size(); ++s, cell += 3) {
      results.push_back(
          bench::overhead(cell[2], cell[1], cell[0], 1, static_cast<double>(work.regions)));
      print(sides[s]->name, "overhead per region", work, arguments, results[s]);
    }
    ours.push_back(results[0].min_ns);
    const std::string label = std::to_string(work.ops) +
                              (work.ops == 1 ? " operator" : " operators") +
                              (work.preserve_rng_state ? "" : ", preserve_rng_state = false");
    for (const bool is_median : {false, true}) {
      const auto value = [&](std::size_t s) {
        return is_median ? results[s].median_ns : results[s].min_ns;
      };
      std::string line =
          is_median ? text("%-42s %8.0f %7s", "    median", value(0), "")
                    : text("%-42s %8.0f %7.2f", label.c_str(), value(0), value(0) / sin_ns);
      for (std::size_t s = 1; s < sides.size(); ++s)
        line += text(" %11.0f %8.2f", value(s), value(s) / value(0));
      table.push_back(line);
    }
    if (!arguments.device.is_cpu()) {
      // The cells of this work begin with those of all sides.
      const bench::Cell* const first = cell - 3 * sides.size();
      std::string line = text("%-42s", "    until it is queued");
      for (std::size_t s = 0; s < sides.size(); ++s) {
        const bench::Cell* const own = first + 3 * s;
        line += text(s == 0 ? " %8.0f        " : " %11.0f         ",
                     (host_ns(own[2]) - host_ns(own[1]) - host_ns(own[0])) /
                         static_cast<double>(work.regions));
      }
      table.push_back(line);
    }
  }
  // Two points make a line: the cost of a region, and of each tensor saved in it.
  for (std::size_t i = 0; i + 1 < works.size(); i += 2) {
    const double per_tensor =
        (ours[i + 1] - ours[i]) / static_cast<double>(works[i + 1].ops - works[i].ops);
    const double per_region = ours[i] - per_tensor * static_cast<double>(works[i].ops);
    table.push_back(text("in units of sin%s: %.2f per region + %.2f per saved tensor",
                         works[i].preserve_rng_state ? "" : ", preserve_rng_state = false",
                         per_region / sin_ns, per_tensor / sin_ns));
  }
}

int run(int argc, char** argv) {
  // Empty: no Python uses this LibTorch as its torch.
  std::string interpreter = REMAT_BENCH_PYTHON;
  const Arguments arguments =
      bench::parse(argc, argv, {{"--python PYTHON", &interpreter}}, bench::RunsOn::AnyDevice);

  InProcess remat("remat", remat_region, arguments.device);
  InProcess reentrant("re-entrant", reentrant_region, arguments.device);
  std::optional<Python> python;
  if (interpreter.empty())
    std::fprintf(stderr, "no Python has this LibTorch as its torch: it takes no part\n");
  else if (arguments.with_peer)
    python.emplace(std::vector<std::string>{
        interpreter, std::filesystem::path(REMAT_BENCH_FOLDER) / "region_cost.py",
        arguments.device.str()});
  std::vector<Side*> sides{&remat, &reentrant};
  if (python) sides.push_back(&*python);

  const std::vector<Work> works{{20, 1}, {20, 10}, {20, 1, false}, {20, 10, false}};
  const bool all_right = verify(sides, works);
  std::fprintf(stderr, "gradients %s\n", all_right ? "equal those of plain autograd" : "are WRONG");
  if (!all_right || arguments.smoke) return all_right ? 0 : 1;

  regions(sides, works, arguments);
  std::fprintf(stderr, "\n");
  for (const auto& line : table) std::fprintf(stderr, "%s\n", line.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::main_of(run, argc, argv); }
