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
      then == now ? "was written to through another one that shares its memory"
                  : fmt::format("is at version {}; expected version {} instead", now, then));
}

}  // namespace

void throw_changed_buffer(const Region& region, const std::string& name) {
  throw_about(
      region, Kind::CaptureChanged, {-1, "other contents", "these contents", name},
      fmt::format(
          "The recompute left {} with other contents than forward did, so the gradient would be wrong. In {}.\n"
          "Cause: the function writes to the buffer, and what it writes depends on state that a recompute cannot put "
          "back (a member that counts calls, a list, a file); neither what the buffer held when forward began nor what "
          "forward left in it gives the same again.\n"
          "Hint: keep that state in a buffer (register_buffer), pass it as an argument, or write to the buffer outside of "
          "the region; with BufferPolicy::Ignore the recompute takes the buffer as it is.",
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
          "{}Cause: {}, {}.\nHint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, and "
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

void throw_moved_statistics(const Region& region, int64_t number, const TensorIdentity& argument) {
  const About about{number, "running statistics of the call", "moved by a batch norm",
                    name_of(region, argument)};
  throw_about(
      region, Kind::InputChanged, about,
      fmt::format(
          "one of the variables needed for gradient computation has been modified by an "
          "inplace operation: a batch norm in training mode moved its running statistics, "
          "which are tensor {} of the arguments of {}, counted from 0{}.\n"
          "Cause: a recompute would begin with the moved statistics, and would move them "
          "once more.\nHint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions, "
          "and a recompute moves a copy; or set buffers = BufferPolicy::Ignore if twice is "
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
          "{}Cause: it was written to past LibTorch's mutable pointers, so that the copy which the "
          "region keeps (InputMode::CopyOnWrite) is lost, too.\nHint: write through "
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
                  "storage or another shape; its version does not show that.\nHint: call backward "
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
          "forward.\nHint: pass the tensor once and make the view in the function, or let the "
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
          "the saved-tensor hooks around the region.\nHint: let the function write to a copy, "
          "and run forward again.",
          number, title(region)));
}

void throw_written_ahead(const Region& region, int64_t number) {
  throw_about(
      region, Kind::InputChanged, {number, "not written to", "written to in a recompute"},
      fmt::format(
          "one of the variables needed for gradient computation has been modified by an "
          "inplace operation: a recompute that forward waits for wrote to tensor {} of the "
          "arguments of {}, which forward has not done yet.\n"
          "Cause: the function waits for a backward over what it computes itself, on another "
          "thread or where a recompute cannot be stopped (a noexcept function), and then writes to its "
          "argument, which is done twice.\nHint: set inputs = remat::InputMode::CopyOnWrite in "
          "CheckpointOptions, or use the out-of-place operator, or run that backward on the "
          "function's own thread.",
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
          "Performing two backward calls that overlap (i.e. require the same saved "
          "activation) in a GraphExecGroup. In {}, saved tensor at position {}{}.\n"
          "Cause: a group releases a tensor when the first backward has read it.\n"
          "Hint: let the calls ask for disjoint gradients, close the group between them, or "
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
          slot.is_inner_input ? " as an argument of a region inside"
          : about.op.empty()  ? ""
                              : " by " + about.op,
          tensor._version(), saved_version,
          slot.is_inner_input
              ? "Cause: the function of the region inside writes to its own argument, as an "
                "in-place activation at its beginning does, or the argument is changed in place "
                "after that region's call; a recompute would begin with what was written.\n"
                "Hint: set inputs = remat::InputMode::CopyOnWrite in CheckpointOptions of the region "
                "inside, and it keeps a copy of its own; or pass it a clone (`x.clone()`), or use "
                "the out-of-place operator."
              : "Cause: a tensor that backward needs is changed in place after it was saved; "
                "plain autograd refuses this too.\nHint: use the out-of-place operator there."));
}

}  // namespace remat
