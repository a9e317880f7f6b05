#include "lib/frame/mismatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

#include "lib/base/invariant.h"
#include "lib/scope/op_log.h"
#include "lib/tensor/tensor_metadata.h"

namespace remat {

namespace {

using Kind = CheckpointError::Kind;
using Mismatch = CheckpointError::Mismatch;

// Limits that keep a plain error under 40 lines and a debug report under 60.
constexpr std::size_t max_listed = 5;
constexpr int64_t max_operators = 14, max_operators_beside_stacks = 6;

/// The operators around the first difference of two logs.
struct Divergence {
  int64_t number = -1;  // -1: none found
  std::string forward, recompute;
};

Divergence first_difference(const OpLog& forward, const OpLog& recompute) {
  const int64_t end = std::max(forward.size(), recompute.size());
  for (int64_t i = 0; i < end; ++i)
    if (std::string a = forward.at(i), b = recompute.at(i); a != b) return {i, a, b};
  return {};
}

void append_log(std::string& text, const char* heading, const OpLog& log, int64_t from,
                int64_t to) {
  text += fmt::format("{} ({} operators):\n", heading, log.size());
  for (int64_t i = std::max<int64_t>(from, 0); i < std::min(to, log.size()); ++i)
    text += fmt::format("  {:4} {}\n", i, log.at(i));
}

/// Appends the stack of the operator with that number, if there is one.
void append_stack(std::string& text, const char* pass, const OpLog& log, int64_t number) {
  const std::vector<std::string> frames = log.stack_at(number);
  if (frames.empty()) return;
  text += fmt::format("Called in the {} by:\n", pass);
  for (const std::string& frame : frames) text += fmt::format("    {}\n", frame);
}

/// Returns the debug report, or how to get one. Without `debug` no recompute has a log.
std::string operators_text(const Region& region, const OpLog* recompute_log) {
  if (recompute_log == nullptr)
    return "To see the operators of both passes and the first that differs, pass `debug = true` in "
           "CheckpointOptions, or open a remat::DebugGuard(true) around the forward.\n";
  const OpLog& forward = region.extras->forward_log;
  const Divergence first = first_difference(forward, *recompute_log);
  std::string text =
      "You are seeing this error because CheckpointOptions had `debug = true` (or a "
      "remat::DebugGuard was open). Below are the operators that ran in the forward and in the "
      "recompute; "
      "differences in detach and an early end of the recompute are expected.";
  text += forward.keeps_stacks
              ? "\n"
              : " Set REMAT_DEBUG_STACKS=1 in the environment to see where the first different "
                "operator was called.\n";
  if (first.number >= 0) {
    text += fmt::format("First difference: operator {}.\n  forward:   {}\n  recompute: {}\n",
                        first.number, first.forward.empty() ? "(none)" : first.forward,
                        first.recompute.empty() ? "(none)" : first.recompute);
    append_stack(text, "forward", forward, first.number);
    append_stack(text, "recompute", *recompute_log, first.number);
  }
  const int64_t shown = forward.keeps_stacks ? max_operators_beside_stacks : max_operators;
  const int64_t from = first.number < 0 ? 0 : first.number - shown / 2;
  append_log(text, "Operators of the forward", forward, from, from + shown);
  append_log(text, "Operators of the recompute", *recompute_log, from, from + shown);
  return text;
}

/// Adds the names that errors quote: the parameter or buffer that a tensor is, and the operator
/// that saved it.
Mismatch with_names(const Region& region, Difference difference) {
  Mismatch& mismatch = difference.mismatch;
  if (mismatch.forward_tensor.empty())
    mismatch.forward_tensor = name_of(region, difference.forward.tensor);
  mismatch.recompute_tensor = name_of(region, difference.recompute);
  if (mismatch.forward_op.empty()) mismatch.forward_op = saver_of(difference.forward);
  return std::move(mismatch);
}

std::vector<Mismatch> with_names(const Region& region, std::vector<Difference> differences) {
  std::vector<Mismatch> all;
  for (Difference& each : differences) {
    const bool is_listed = all.size() < max_listed;
    all.push_back(is_listed ? with_names(region, std::move(each)) : std::move(each.mismatch));
  }
  return all;
}

/// Returns the name of a tensor that both passes saved. If a capture was replaced, only the new one
/// may have a name.
std::string common_name(const Mismatch& mismatch, Kind kind) {
  const auto& [then, now] = std::tie(mismatch.forward_tensor, mismatch.recompute_tensor);
  if (kind == Kind::CaptureChanged) return then.empty() ? now : then;
  return then == now ? then : std::string();
}

std::string table(const std::vector<Mismatch>& mismatches, Kind kind) {
  std::string text;
  for (std::size_t i = 0; i < std::min(mismatches.size(), max_listed); ++i) {
    const Mismatch& m = mismatches[i];
    const std::string name = common_name(m, kind);
    const auto line = [&](const std::string& what, const std::string& tensor,
                          const std::string& op) {
      return what + (name.empty() && !tensor.empty() ? ", " + tensor : "") +
             (op.empty() ? "" : ", saved by " + op);
    };
    const std::string position = m.position < 0
                                     ? "captured tensor that the region does not save"
                                     : fmt::format("saved tensor at position {}", m.position);
    text += fmt::format("{}:\n  forward:   {}\n  recompute: {}\n",
                        name.empty() ? position : fmt::format("{} ({})", name, position),
                        line(m.forward, m.forward_tensor, m.forward_op),
                        line(m.recompute, m.recompute_tensor, m.recompute_op));
  }
  if (mismatches.size() > max_listed)
    text += fmt::format("… and {} more.\n", mismatches.size() - max_listed);
  return text;
}

/// Returns whether a mismatch has no names and the region knows no modules.
bool lacks_names(const Region& region, const std::vector<Mismatch>& mismatches) {
  return !knows_modules(region) &&
         std::any_of(mismatches.begin(), mismatches.end(), [](const Mismatch& each) {
           return each.forward_tensor.empty() && each.recompute_tensor.empty();
         });
}

/// Returns the sentence about an initialization or state that the recompute saw, which precedes the
/// usual causes.
std::string seen_text(const Differences& differences) {
  constexpr char advice[] =
      "run one forward outside regions before training (under a remat::DisableCheckpointGuard)";
  if (differences.has_other_members)
    return fmt::format(
        "Seen: the function's module has other parameters or modules than when forward began. It "
        "creates them in its first forward, and they exist already in the recompute: {}.\n",
        advice);
  if (differences.function_writes)
    return fmt::format(
        "Seen: the function itself writes to a captured tensor. If only its first forward does "
        "this (activation normalization, a cache that is filled once), {}. If each forward "
        "updates the tensor, make its module the region's function, or name it in "
        "CheckpointOptions::modules.\n",
        advice);
  if (differences.has_new_state)
    return "Seen: the recompute used a captured tensor whose history was made after forward "
           "began. Either the function, or a later call, assigns the variable anew (the "
           "potential of a spiking neuron, a hidden state), or its first forward computes a "
           "value and keeps it. Pass the tensor as an argument, and return the new one.\n";
  return {};
}

[[noreturn]] void throw_with(const Region& region, Kind kind, const char* fact,
                             const std::string& advice, std::vector<Difference> differences,
                             const OpLog* log) {
  std::vector<Mismatch> mismatches = with_names(region, std::move(differences));
  std::string text = fmt::format("remat::checkpoint: {} In {}.\n{}{}", fact, title(region),
                                 table(mismatches, kind), advice);
  if (kind != Kind::CaptureChanged)
    text += operators_text(region, log);
  else if (lacks_names(region, mismatches))
    text +=
        "To see which parameter or buffer it is, pass the module as the function, or name it in "
        "CheckpointOptions::modules.\n";
  CheckpointError::Facts facts = facts_of(kind, region);
  facts.mismatches = std::move(mismatches);
  raise(region, std::move(text), std::move(facts));
}

}  // namespace

CheckpointError::Facts facts_of(Kind kind, const Region& region) {
  CheckpointError::Facts facts;
  facts.kind = kind;
  facts.region = region.info.name();
  facts.frame_id = region.info.id;
  return facts;
}

void report_returned(const char* function) {
  REMAT_INVARIANT(false, "a RegionBody returned from {}()", function);
  std::terminate();
}

void raise(const Region& region, std::string text, CheckpointError::Facts facts) {
  region.body->raise(CheckpointError(std::move(text), std::move(facts)));
  report_returned("raise");
}

void Differences::clear_capture(int64_t position) {
  std::erase_if(captures,
                [position](const Difference& each) { return each.mismatch.position == position; });
}

void throw_differences(const Region& region, Differences differences, const OpLog* log) {
  const std::string seen = seen_text(differences);
  if (differences.has_captures())
    throw_with(
        region, Kind::CaptureChanged,
        "A parameter, buffer or captured tensor changed between the forward and the "
        "recompute, so the gradient would be wrong.",
        seen +
            "Cause: it was changed in place, given other storage, or replaced. An optimizer step "
            "between forward and backward does this. A tensor without grad that the function "
            "creates and stores in an outside variable counts as captured, too.\n"
            "Hint: call backward before the change, pass the tensor as an argument, or set "
            "capture_check = CaptureCheck::Ignore to recompute with the new value.\n",
        std::move(differences.changed_captures()), log);
  if (!differences.metadata.empty())
    throw_with(
        region, Kind::MetadataMismatch,
        "Recomputed values for the following tensors have different metadata than during the "
        "forward pass.",
        seen +
            "Cause: the recompute did not repeat the computation of forward (a branch on outside "
            "state, a cache that each call extends, a changed flag, an initialization in the "
            "first forward).\n"
            "Hint: let the function depend on its arguments and on unchanged captures only, or "
            "run the region without remat::checkpoint.\n",
        std::move(differences.metadata), log);
  throw_with(
      region, Kind::ValueMismatch,
      "Recomputed values for the following tensors have different contents than during the "
      "forward pass.",
      "Cause: the recompute computed other numbers than forward (nondeterministic kernels, an "
      "unregistered generator, a parameter changed through .data(), or a counter that it reads: "
      "a step number, annealing, warm-up).\n"
      "Hint: make the kernels deterministic, call backward before parameters change, and pass "
      "such a counter as an argument: a recompute gets its value of forward.\n",
      std::move(differences.contents), log);
}

void throw_count_mismatch(const Region& region, int64_t forward_count, int64_t recompute_count,
                          Differences differences, std::optional<Difference> parting,
                          const OpLog* log) {
  const bool is_more = recompute_count > forward_count;
  CheckpointError::Facts facts = facts_of(is_more ? Kind::MoreTensors : Kind::FewerTensors, region);
  facts.forward_count = forward_count;
  facts.recompute_count = recompute_count;
  facts.mismatches =
      with_names(region, differences.has_captures()      ? std::move(differences.changed_captures())
                         : !differences.metadata.empty() ? std::move(differences.metadata)
                                                         : std::move(differences.contents));
  if (facts.mismatches.empty() && parting)
    facts.mismatches.push_back(with_names(region, std::move(*parting)));
  const std::string seen = seen_text(differences);
  const char* fact =
      is_more ? "trying to save more tensors during recomputation than during the original forward "
                "pass."
              : "A different number of tensors was saved during the original forward and "
                "recomputation.";
  raise(region,
        fmt::format(
            "remat::checkpoint: {} In {}.\n"
            "  forward:   {} tensors\n"
            "  recompute: {} tensors{}\n"
            "{}{}Cause: the recompute did not run the operators of forward (a branch on outside "
            "state, a changed flag, an initialization in the first forward, another grad mode).\n"
            "Hint: let the function depend on its arguments and on unchanged captures only.\n"
            "{}",
            fact, title(region), forward_count, recompute_count,
            is_more ? " when it was noticed" : "", table(facts.mismatches, facts.kind), seen,
            operators_text(region, log)),
        facts);
}

}  // namespace remat
