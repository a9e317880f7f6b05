#pragma once
// Faults that a test plants in the library to show that the fuzzer finds them. Absent from usual
// builds.

#ifdef REMAT_PLANTED_FAULTS
#include <cstdlib>
#endif

namespace remat {

/// Each makes one thing go wrong. tests/fuzz/faults_test.py reads the names here.
enum class Fault {
  None,
  RandomNumbers,  ///< a recompute draws new numbers
  NestedDraws,    ///< a region does not note the draws of regions in it
  Autocast,       ///< a recompute runs in the autocast state of backward
  CaptureCheck,   ///< changes of captured tensors are not checked
  SavedVersion,   ///< in-place changes of saved tensors are not checked
  LateWrite,      ///< a recompute stops before an operator writes a tensor that it saved
  OwnOutput,      ///< a recompute stops where a C++ Function is saving its own output
  SwappedSlots,   ///< two tensors of one shape are swapped
  InnerInput,     ///< the input of an inner region comes back as zeros
  TaskEnd,        ///< values that a backward did not read outlive it
  KeptResult,     ///< a kept call gets the result of another one
  KeptDraws,      ///< a replay does not skip the draws of kept calls

  WrittenArgument,   ///< a recompute may write to an argument that hooks hold
  ReplacedArgument,  ///< other storage of an argument is not checked
  ArgumentObject,    ///< a leaf argument comes back as another object, without its grad
  HookTwice,         ///< hooks that a recompute registers outside remain

  BufferBegin,    ///< a recompute sees a buffer as it is now
  BufferEnd,      ///< a buffer keeps the contents of a recompute
  BufferVersion,  ///< a recompute's writes to a buffer remain in its version
  BufferLayout,   ///< a buffer that was given other data has them in a recompute
  BufferStop,     ///< a recompute stops before the last write to a buffer
  BufferCompare,  ///< a recompute's final buffers are not compared
  BufferStart,    ///< no recompute begins from forward's end
  BufferKept,     ///< contents of unwritten buffers are not forgotten
  BufferInside,   ///< a region does not note modules of calls that run in it normally
};

#ifdef REMAT_PLANTED_FAULTS
/// Returns whether the environment variable REMAT_PLANTED_FAULT has the number of this fault.
inline bool is_planted(Fault fault) {
  static const int planted = [] {
    const char* const number = std::getenv("REMAT_PLANTED_FAULT");
    return number == nullptr ? 0 : std::atoi(number);
  }();
  return planted == static_cast<int>(fault);
}
#else
constexpr bool is_planted(Fault) { return false; }
#endif

}  // namespace remat
