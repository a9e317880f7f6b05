#include "lib/frame/mismatch.h"

#include <c10/core/DefaultDtype.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

#include "lib/base/invariant.h"
#include "lib/observe/op_log.h"
#include "lib/tensor/tensor_metadata.h"

namespace remat {

namespace {

using Kind = CheckpointError::Kind;
using Mismatch = CheckpointError::Mismatch;

// So that a plain error stays under 40 lines and a debug report under 60.
constexpr std::size_t max_listed = 5;
constexpr int64_t max_operators = 14, max_operators_beside_stacks = 6;

CheckpointError::Facts facts_of(Kind kind, const Region& region) {
  CheckpointError::Facts facts;
  facts.kind = kind;
  facts.region = region.info.name();
  facts.frame_id = region.info.id;
  return facts;
}

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

/// The stack of the operator with that number, if there is one.
void append_stack(std::string& text, const char* pass, const OpLog& log, int64_t number) {
  const std::vector<std::string> frames = log.stack_at(number);
  if (frames.empty()) return;
  text += fmt::format("Called in the {} by:\n", pass);
  for (const std::string& frame : frames) text += fmt::format("    {}\n", frame);
}

/// The debug report, or how to get it. Without `debug` no recompute has a log.
std::string operators_text(const Region& region, const OpLog* recompute_log) {
  if (recompute_log == nullptr)
    return "To see the operators of both passes and the first that differs, pass `debug = true` in "
           "CheckpointOptions, or open a remat::DebugGuard(true) around the forward.\n";
  const OpLog& forward = region.extras->forward_log;
  const Divergence first = first_difference(forward, *recompute_log);
  std::string text =
      "You are seeing this error because you passed `debug=True` to checkpoint (or opened a "
      "remat::DebugGuard). Below are the operators that ran in the forward and in the recompute; "
      "differences in detach and an early end of the recompute are expected.";
  text += forward.keeps_stacks
              ? "\n"
              : " REMAT_DEBUG_STACKS=1 in the environment shows where the first that differs was "
                "called.\n";
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

/// The names that errors say: which parameter or buffer a tensor is, and what saved it.
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

/// What both passes saved. Of a capture that was replaced only the new one may have a name.
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

/// Whether a change has a tensor that no module is known to have, and none is known.
bool lacks_names(const Region& region, const std::vector<Mismatch>& mismatches) {
  return !knows_modules(region) &&
         std::any_of(mismatches.begin(), mismatches.end(), [](const Mismatch& each) {
           return each.forward_tensor.empty() && each.recompute_tensor.empty();
         });
}

/// What the recompute saw of a function that its first forward initialises: it comes before the usual causes.
std::string first_forward_text(const Differences& differences) {
  constexpr char advice[] =
      "run one forward outside regions before training (under a remat::DisableCheckpointGuard)";
  if (differences.has_other_members)
    return fmt::format(
        "Seen: the function's module has other parameters or modules than when forward began: it "
        "makes them in its first forward, and the recompute finds them made; {}.\n",
        advice);
  if (differences.function_writes)
    return fmt::format(
        "Seen: the function itself writes to a captured tensor. If that is what its first forward "
        "initialises (activation normalisation, a cache that is filled once), {}; if it is state that each "
        "forward updates, make its module the region's function or name it in "
        "CheckpointOptions::modules.\n",
        advice);
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
  const std::string seen = first_forward_text(differences);
  if (differences.has_captures())
    throw_with(
        region, Kind::CaptureChanged,
        "A parameter, buffer or captured tensor changed between the forward and the "
        "recompute, so the gradient would be wrong.",
        seen +
            "Cause: it was changed in place, given other storage, or replaced (an optimizer step "
            "between forward and backward does this). A tensor without grad that the function makes and "
            "leaves in an outside variable counts as captured too.\nDo: call backward before the change, pass "
            "the tensor as an argument, or set capture_check = CaptureCheck::Ignore to "
            "recompute with the new value.\n",
        std::move(differences.changed_captures()), log);
  if (!differences.metadata.empty())
    throw_with(
        region, Kind::MetadataMismatch,
        "Recomputed values for the following tensors have different metadata than during the "
        "forward pass.",
        seen +
            "Cause: the function did not compute the same again (a branch on outside state, a cache that "
            "each call extends, a changed flag, an initialisation in its first forward).\nDo: make it depend on its arguments and on unchanged captures "
            "only, or run the region without remat::checkpoint.\n",
        std::move(differences.metadata), log);
  const TensorCheck::Report& report = differences.check->report();
  throw_with(region, report.kind, report.fact, report.advice, std::move(differences.contents), log);
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
  const std::string seen = first_forward_text(differences);
  const char* fact =
      is_more ? "trying to save more tensors during recomputation than during the original forward "
                "pass."
              : "A different number of tensors was saved during the original forward and "
                "recomputation.";
  raise(
      region,
      fmt::format(
          "remat::checkpoint: {} In {}.\n  forward:   {} tensors\n  recompute: {} tensors{}\n{}{}"
          "Cause: the function did not run the same operators again (a branch on outside "
          "state, a changed flag, an initialisation in its first forward, another grad mode).\nDo: make it depend on its arguments "
          "and on unchanged captures only.\n{}",
          fact, title(region), forward_count, recompute_count,
          is_more ? " when it was noticed" : "", table(facts.mismatches, facts.kind), seen,
          operators_text(region, log)),
      facts);
}

namespace {

/// An error about one tensor: an argument, by its number among those, or what is saved at a position.
struct About {
  int64_t number;
  std::string then, now, tensor{}, op{};
};
[[noreturn]] void throw_about(const Region& region, Kind kind, About about, std::string text) {
  CheckpointError::Facts facts = facts_of(kind, region);
  facts.mismatches.push_back({.position = about.number,
                              .forward = std::move(about.then),
                              .recompute = std::move(about.now),
                              .forward_op = std::move(about.op),
                              .recompute_op = {},
                              .forward_tensor = about.tensor,
                              .recompute_tensor = about.tensor});
  raise(region, "remat::checkpoint: " + std::move(text), std::move(facts));
}

[[noreturn]] void throw_plainly(const Region& region, Kind kind, const std::string& fact,
                                const std::string& cause, const std::string& advice) {
  raise(region,
        fmt::format("remat::checkpoint: {}. In {}.\nCause: {}.\nDo: {}.", fact, title(region),
                    cause, advice),
        facts_of(kind, region));
}

}  // namespace

namespace {

/// ", parameter 'weight' of Linear," or so behind a word; nothing if there is no name.
std::string apposition(const std::string& name, const char* end = "") {
  return name.empty() ? "" : ", " + name + end;
}

/// ", parameter 'weight' of Linear, saved by MmBackward0".
std::string slot_words(const About& about) {
  return apposition(about.tensor) + (about.op.empty() ? "" : ", saved by " + about.op);
}

/// The sentence by which people look it up, and which argument it is.
std::string changed_argument(const Region& region, const About& about, uint32_t then,
                             uint32_t now) {
  return fmt::format(
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: tensor {} of the arguments of {}, counted from 0{}, {}.\n",
      about.number, title(region), apposition(about.tensor),
      then == now ? "was written to through another one that shares its memory"
                  : fmt::format("is at version {}; expected version {} instead", now, then));
}

}  // namespace

void throw_changed_argument(const Region& region, int64_t number, const TensorIdentity& argument,
                            uint32_t then, uint32_t now, ChangedBy by, bool is_held_by_hooks) {
  const bool by_function = by == ChangedBy::Function;
  const About about{
      number, fmt::format("passed at version {}", then),
      by_function ? "written to by the function" : fmt::format("is at version {}", now),
      name_of(region, argument)};
  throw_about(
      region, Kind::InputChanged, about,
      fmt::format(
          "{}Cause: {}, {}.\nDo: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, and "
          "the region keeps a copy of its own; or pass a clone (`x.clone()`), or {}.",
          changed_argument(region, about, then, now),
          by_function
              ? "the region's function writes to its own argument, as an in-place activation "
                "at its beginning does"
              : "it was changed in place after the call of the region",
          is_held_by_hooks
              ? "and the saved-tensor hooks around it had kept the tensor itself, not a "
                "copy"
              : "and a recompute would begin with what was written",
          by_function ? "let the function use the out-of-place operator"
                      : "call backward before the change"));
}

void throw_unseen_write(const Region& region, int64_t number, const TensorIdentity& argument,
                        uint32_t then, uint32_t now) {
  const About about{number, fmt::format("passed at version {}", then),
                    fmt::format("is at version {}", now), name_of(region, argument)};
  throw_about(
      region, Kind::InputChanged, about,
      fmt::format(
          "{}Cause: it was written to past LibTorch's mutable pointers, so that the copy which the "
          "region keeps (InputMode::CopyOnWrite) is lost, too.\nDo: write through "
          "`mutable_data_ptr()`, or pass a clone (`x.clone()`).",
          changed_argument(region, about, then, now)));
}

void throw_replaced_argument(const Region& region, int64_t number, const at::Tensor& now) {
  const About about{number, "the data of the call",
                    TensorMetadata(now, false).text() + ", other data",
                    name_of(region, TensorIdentity::of(now))};
  throw_about(
      region, Kind::InputChanged, about,
      fmt::format("An argument was given other data between the forward and the recompute, so the "
                  "gradient would be wrong: tensor {} of the arguments of {}{}, which is {} now.\n"
                  "Cause: set_data, set_, resize_ or an assignment to its data gave it another "
                  "storage or another shape; its version does not show that.\nDo: call backward "
                  "before, pass an alias (`x.detach()`), or set capture_check = "
                  "CaptureCheck::Ignore to recompute with the new data.",
                  number, title(region), apposition(about.tensor),
                  TensorMetadata(now, false).text()));
}

void throw_parted_arguments(const Region& region, int64_t number, int64_t other) {
  throw_about(
      region, Kind::Unsupported, {number, "one memory", "a memory of its own"},
      fmt::format(
          "a function wrote to an argument that shares its memory with another argument, "
          "and the saved-tensor hooks around it gave the two back apart: tensors {} and {} "
          "of the arguments of {}.\n"
          "Cause: in the recompute the write would not reach the other one, as it did in "
          "forward.\nDo: pass the tensor once and make the view in the function, or let the "
          "function write to a copy.",
          number, other, title(region)));
}

void throw_spoiled_argument(const Region& region, int64_t number) {
  throw_about(
      region, Kind::InputChanged, {number, "not written to", "written to in a recompute"},
      fmt::format(
          "one of the variables needed for gradient computation has been modified by an "
          "inplace operation: a recompute wrote to tensor {} of the arguments of {}, which "
          "forward had not done.\n"
          "Cause: the function does not do the same again, and what it wrote to belongs to "
          "the saved-tensor hooks around the region.\nDo: let the function write to a copy, "
          "and run forward again.",
          number, title(region)));
}

void throw_double_unpack(const Region& region, int64_t position, const SlotIdentity& slot) {
  const About about{position, "read once", "read again in the same backward",
                    name_of(region, slot.tensor), saver_of(slot)};
  throw_about(
      region, Kind::DoubleUnpack, about,
      fmt::format("Unpack is being triggered for a tensor that was already unpacked once. In {}, "
                  "saved tensor at position {}{}, within one backward.\n"
                  "Do: read it once and keep the result, or leave strict_unpack off: then it is "
                  "recomputed again.",
                  title(region), position, slot_words(about)));
}

void throw_group_overlap(const Region& region, int64_t position, const SlotIdentity& slot) {
  const About about{position, "read by one backward", "read by another one",
                    name_of(region, slot.tensor), saver_of(slot)};
  throw_about(
      region, Kind::GroupOverlap, about,
      fmt::format("Performing two backward calls that overlap (i.e. require the same saved "
                  "activation) in a GraphExecGroup. In {}, saved tensor at position {}{}.\n"
                  "Cause: a group releases a tensor when the first backward has read it.\n"
                  "Do: let the calls ask for disjoint gradients, close the group between them, or "
                  "use a RecomputeCacheGuard, which keeps what several calls need.",
                  title(region), position, slot_words(about)));
}

void throw_recompute_failed(const Region& region, const std::string& fact, const std::string& cause,
                            const std::string& advice) {
  throw_plainly(region, Kind::RecomputeFailed, fact, cause, advice);
}

void throw_default_dtype(const Region& region, at::ScalarType in_forward) {
  throw_recompute_failed(
      region,
      fmt::format("the default dtype was {} when the region began and is {} now, so that the "
                  "recompute could make tensors of another dtype",
                  c10::toString(in_forward), c10::toString(c10::get_default_dtype_as_scalartype())),
      "torch::set_default_dtype was called since, and a recompute cannot set what all threads share",
      "set it back before backward; or restore it by a StateProvider, if no other thread depends on "
      "it");
}

void throw_changed_script(const Region& region) {
  throw_recompute_failed(
      region,
      "this region runs a TorchScript function whose executor changed its plan between forward "
      "and recompute, so that the saved tensors would not be those of forward",
      "TorchScript profiles the first calls of a function and runs an optimised plan after them, "
      "which saves other tensors; a call outside the region, before this backward, made it "
      "settle, or a function was called past its module",
      "make the script module itself the region's function, `checkpoint(module, x)`: then the "
      "region keeps the plan of forward; or call the function two times with backward before "
      "training, or under torch::jit::GraphOptimizerEnabledGuard(false)");
}

void throw_selective(const Region& region, Kind kind, const std::string& fact,
                     const std::string& cause, const std::string& advice, const std::string& lists,
                     const TensorIdentity& tensor, Differences seen) {
  // Leaves that were saved in another order explain nothing.
  for (const int64_t position : seen.other_leaves) seen.clear_capture(position);
  // What came back in other storage may be the run's own. It may explain that operators part, but not
  // that what is kept was written to.
  if (kind == Kind::SelectiveMutation)
    for (const int64_t position : seen.replaced) seen.clear_capture(position);
  if (!seen.captures.empty() || (kind != Kind::SelectiveMutation && seen.has_captures()))
    throw_differences(region, std::move(seen), nullptr);
  // The words that people look up.
  const char* const sentence =
      kind == Kind::SelectiveMutation
          ? "Tensor cached during selective activation checkpoint has been mutated. In "
          : "";
  const std::string name = name_of(region, tensor);
  raise(region,
        fmt::format("remat: {}{}: {}{}.\nCause: {}.\nDo: {}.\n{}", sentence, title(region), fact,
                    name.empty() ? "" : ": " + name, cause, advice, lists),
        facts_of(kind, region));
}

void throw_unsupported(const Region& region, const std::string& fact, const std::string& cause,
                       const std::string& advice) {
  throw_plainly(region, Kind::Unsupported, fact, cause, advice);
}

void throw_changed_value(const Region& region, int64_t position, const SlotIdentity& slot,
                         const at::Tensor& tensor, uint32_t saved_version) {
  const About about{position, fmt::format("saved at version {}", saved_version),
                    fmt::format("is at version {}", tensor._version()),
                    name_of(region, slot.tensor), saver_of(slot)};
  throw_about(
      region, Kind::ValueMismatch, about,
      fmt::format(
          "one of the variables needed for gradient computation has been modified by an "
          "inplace operation: {}{}, saved in {} at position {}{}, is at version {}; expected "
          "version {} instead.\n{}",
          TensorMetadata(tensor, false).text(), apposition(about.tensor), title(region), position,
          slot.is_inner_input ? " as an argument of a region inside"
          : about.op.empty()  ? ""
                              : " by " + about.op,
          tensor._version(), saved_version,
          slot.is_inner_input
              ? "Cause: the function of the region inside writes to its own argument, as an "
                "in-place activation at its beginning does, or the argument is changed in place "
                "after that region's call; a recompute would begin with what was written.\n"
                "Do: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions of the region "
                "inside, and it keeps a copy of its own; or pass it a clone (`x.clone()`), or use "
                "the out-of-place operator."
              : "Cause: a tensor that backward needs is changed in place after it was saved; "
                "plain autograd refuses this too.\nDo: use the out-of-place operator there."));
}

}  // namespace remat
