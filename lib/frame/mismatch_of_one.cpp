// Errors of a region about one tensor, an argument or a changed value, and errors about no tensor.

#include <c10/core/DefaultDtype.h>
#include <fmt/format.h>

#include <utility>

#include "lib/frame/mismatch.h"
#include "lib/tensor/tensor_metadata.h"

namespace remat {

namespace {

using Kind = CheckpointError::Kind;

/// The tensor of an error: an argument, by its number, or a saved tensor, by its position.
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
        fmt::format("remat::checkpoint: {}. In {}.\nCause: {}.\nHint: {}.", fact, title(region),
                    cause, advice),
        facts_of(kind, region));
}

/// Returns ", parameter 'weight' of Linear," or the like, to follow a word; empty if there is no
/// name.
std::string apposition(const std::string& name, const char* end = "") {
  return name.empty() ? "" : ", " + name + end;
}

/// Returns ", parameter 'weight' of Linear, saved by MmBackward0".
std::string slot_words(const About& about) {
  return apposition(about.tensor) + (about.op.empty() ? "" : ", saved by " + about.op);
}

/// Returns the sentence that users search for, and the argument that it is about.
std::string changed_argument(const Region& region, const About& about, uint32_t then,
                             uint32_t now) {
  return fmt::format(
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: tensor {} of the arguments of {}, counted from 0{}, {}.\n",
      about.number, title(region), apposition(about.tensor),
      then == now ? "was written to through another tensor that shares its memory"
                  : fmt::format("is at version {}; expected version {} instead", now, then));
}

}  // namespace

void throw_changed_buffer(const Region& region, const std::string& name) {
  throw_about(
      region, Kind::CaptureChanged, {-1, "other contents", "these contents", name},
      fmt::format(
          "The recompute left {} with other contents than forward did, so the gradient would be "
          "wrong. In {}.\n"
          "Cause: the function writes values to the buffer that depend on state which a "
          "recompute cannot restore (a member that counts calls, a list, a file). The recompute "
          "gave other values both from the buffer as it was before forward, and from the buffer "
          "as it was after.\n"
          "Hint: keep that state in a buffer (register_buffer), pass it as an argument, or write "
          "to the buffer outside of the region; with BufferPolicy::Ignore the recompute uses the "
          "buffer as it is.",
          name, title(region)));
}

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
          "{}Cause: {}, {}.\n"
          "Hint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, so that the "
          "region keeps its own copy; or pass a clone (`x.clone()`), or {}.",
          changed_argument(region, about, then, now),
          by_function
              ? "the region's function writes to its own argument, as an in-place activation "
                "at its beginning does"
              : "it was changed in place after the call of the region",
          is_held_by_hooks
              ? "and the saved-tensor hooks around the region kept the tensor itself instead of "
                "a copy"
              : "and a recompute would start from the changed values",
          by_function ? "let the function use the out-of-place operator"
                      : "call backward before the change"));
}

void throw_moved_statistics(const Region& region, int64_t number, const TensorIdentity& argument) {
  const About about{number, "running statistics of the call", "updated by a batch norm",
                    name_of(region, argument)};
  throw_about(
      region, Kind::InputChanged, about,
      fmt::format(
          "one of the variables needed for gradient computation has been modified by an inplace "
          "operation: a batch norm in training mode updated its running statistics: tensor {} of "
          "the arguments of {}, counted from 0{}.\n"
          "Cause: a recompute would start from the updated statistics, and would update them "
          "once more.\n"
          "Hint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, so that a "
          "recompute updates a copy; or set buffers = BufferPolicy::Ignore if a second update is "
          "right.",
          number, title(region), apposition(about.tensor)));
}

void throw_unseen_write(const Region& region, int64_t number, const TensorIdentity& argument,
                        uint32_t then, uint32_t now) {
  const About about{number, fmt::format("passed at version {}", then),
                    fmt::format("is at version {}", now), name_of(region, argument)};
  throw_about(
      region, Kind::InputChanged, about,
      fmt::format(
          "{}Cause: it was written to past LibTorch's mutable pointers, which also overwrote the "
          "region's copy (InputMode::CopyOnWrite).\n"
          "Hint: write through `mutable_data_ptr()`, or pass a clone (`x.clone()`).",
          changed_argument(region, about, then, now)));
}

void throw_replaced_argument(const Region& region, int64_t number, const at::Tensor& now) {
  const About about{number, "the data of the call",
                    TensorMetadata(now, false).text() + ", other data",
                    name_of(region, TensorIdentity::of(now))};
  throw_about(
      region, Kind::InputChanged, about,
      fmt::format("An argument was given other data between the forward and the recompute, so "
                  "the gradient would be wrong: tensor {} of the arguments of {}{}, which is {} "
                  "now.\n"
                  "Cause: set_data, set_, resize_ or an assignment to its data gave it another "
                  "storage or another shape, which its version counter does not record.\n"
                  "Hint: call backward before the change, pass an alias (`x.detach()`), or set "
                  "capture_check = CaptureCheck::Ignore to recompute with the new data.",
                  number, title(region), apposition(about.tensor),
                  TensorMetadata(now, false).text()));
}

void throw_parted_arguments(const Region& region, int64_t number, int64_t other) {
  throw_about(
      region, Kind::Unsupported, {number, "the same memory", "separate memory"},
      fmt::format(
          "a function wrote to an argument that shares its memory with another argument, but the "
          "saved-tensor hooks around the region returned the two in separate memory: tensors {} "
          "and {} of the arguments of {}.\n"
          "Cause: in forward the write reached both, and in the recompute it would reach only "
          "one.\n"
          "Hint: pass the tensor once and make the view in the function, or let the function "
          "write to a copy.",
          number, other, title(region)));
}

void throw_spoiled_argument(const Region& region, int64_t number) {
  throw_about(
      region, Kind::InputChanged, {number, "not written to", "written to in a recompute"},
      fmt::format(
          "one of the variables needed for gradient computation has been modified by an inplace "
          "operation: a recompute wrote to tensor {} of the arguments of {}, which forward had "
          "not done.\n"
          "Cause: the recompute did not repeat forward, and the written tensor belongs to the "
          "saved-tensor hooks around the region.\n"
          "Hint: let the function write to a copy, and run forward again.",
          number, title(region)));
}

void throw_written_ahead(const Region& region, int64_t number) {
  throw_about(
      region, Kind::InputChanged, {number, "not written to", "written to in a recompute"},
      fmt::format(
          "one of the variables needed for gradient computation has been modified by an inplace "
          "operation: a recompute wrote to tensor {} of the arguments of {} before forward did, "
          "while forward waits for the recompute.\n"
          "Cause: the function waits for a backward through its own results, on another thread "
          "or where a recompute cannot be stopped (a noexcept function), and then writes to its "
          "argument: the write would happen twice.\n"
          "Hint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, or use the "
          "out-of-place operator, or run that backward on the function's own thread.",
          number, title(region)));
}

void throw_double_unpack(const Region& region, int64_t position, const SlotIdentity& slot) {
  const About about{position, "read once", "read again in the same backward",
                    name_of(region, slot.tensor), saver_of(slot)};
  throw_about(
      region, Kind::DoubleUnpack, about,
      fmt::format("Unpack is being triggered for a tensor that was already unpacked once. In {}, "
                  "saved tensor at position {}{}, within one backward.\n"
                  "Hint: read it once and keep the result, or leave strict_unpack off: then it is "
                  "recomputed again.",
                  title(region), position, slot_words(about)));
}

void throw_group_overlap(const Region& region, int64_t position, const SlotIdentity& slot) {
  const About about{position, "read by one backward", "read by another one",
                    name_of(region, slot.tensor), saver_of(slot)};
  throw_about(
      region, Kind::GroupOverlap, about,
      fmt::format(
          "Performing two backward calls that overlap (i.e. require the same saved activation) "
          "in a GraphExecGroup. In {}, saved tensor at position {}{}.\n"
          "Cause: a group releases a tensor when the first backward has read it.\n"
          "Hint: let the calls ask for disjoint gradients, close the group between them, or use "
          "a RecomputeCacheGuard, which keeps tensors for several calls.",
          title(region), position, slot_words(about)));
}

void throw_recompute_failed(const Region& region, const std::string& fact, const std::string& cause,
                            const std::string& advice) {
  throw_plainly(region, Kind::RecomputeFailed, fact, cause, advice);
}

void throw_default_dtype(const Region& region, at::ScalarType in_forward) {
  throw_recompute_failed(
      region,
      fmt::format("the default dtype was {} when the region began and is {} now, so the "
                  "recompute could create tensors of another dtype",
                  c10::toString(in_forward), c10::toString(c10::get_default_dtype_as_scalartype())),
      "torch::set_default_dtype was called in between, and a recompute cannot change a setting "
      "that all threads share",
      "restore it before backward, or let a StateProvider restore it if no other thread depends "
      "on it");
}

void throw_changed_script(const Region& region) {
  throw_recompute_failed(
      region,
      "this region runs a TorchScript function whose executor changed its plan between forward "
      "and recompute, so the saved tensors would not be those of forward",
      "TorchScript profiles the first calls of a function, and then runs an optimized plan, "
      "which saves other tensors; a call outside the region completed the profiling before this "
      "backward, or a script function was called directly instead of through its module",
      "make the script module itself the region's function, `checkpoint(module, x)`: then the "
      "region keeps the plan of forward; or call the function twice with backward before "
      "training, or under torch::jit::GraphOptimizerEnabledGuard(false)");
}

void throw_selective(const Region& region, Kind kind, const std::string& fact,
                     const std::string& cause, const std::string& advice, const std::string& lists,
                     const TensorIdentity& tensor, Differences seen) {
  // A leaf in the place of another explains nothing, since it may come from a changed order.
  for (const int64_t position : seen.other_leaves) seen.clear_capture(position);
  // A capture with another storage may have been made by the run itself. It may explain diverging
  // operators, but not a write to a kept result.
  if (kind == Kind::SelectiveMutation)
    for (const int64_t position : seen.replaced) seen.clear_capture(position);
  if (!seen.captures.empty() || (kind != Kind::SelectiveMutation && seen.has_captures()))
    throw_differences(region, std::move(seen), nullptr);
  // The words that users search for.
  const char* const sentence =
      kind == Kind::SelectiveMutation
          ? "Tensor cached during selective activation checkpoint has been mutated. In "
          : "";
  const std::string name = name_of(region, tensor);
  raise(region,
        fmt::format("remat: {}{}: {}{}.\nCause: {}.\nHint: {}.\n{}", sentence, title(region), fact,
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
          slot.is_inner_input ? " as an argument of an inner region"
          : about.op.empty()  ? ""
                              : " by " + about.op,
          tensor._version(), saved_version,
          slot.is_inner_input
              ? "Cause: the function of the inner region writes to its own argument, as an "
                "in-place activation at its beginning does, or the argument is changed in place "
                "after the call of that region; a recompute would start from the changed "
                "values.\n"
                "Hint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions of the "
                "inner region, so that it keeps its own copy; or pass it a clone (`x.clone()`), "
                "or use the out-of-place operator."
              : "Cause: a tensor that backward needs is changed in place after it was saved; "
                "plain autograd refuses this too.\nHint: use the out-of-place operator there."));
}

}  // namespace remat
