#pragma once
// Faults that a test plants in the library, to show that the fuzzer finds them; none in usual
// builds.

#ifdef REMAT_PLANTED_FAULTS
#include <cstdlib>
#endif

namespace remat {

/// Each makes one thing go wrong. tests/fuzz/faults_test.py reads the names here.
enum class Fault {
  None,
  RandomNumbers,  ///< a recompute draws new numbers
  NestedDraws,    ///< a region does not note what the regions in it draw
  Autocast,       ///< a recompute runs in the autocast state of backward
  CaptureCheck,   ///< nobody looks whether captured tensors changed
  SavedVersion,   ///< nobody looks whether a saved tensor was changed in place
  LateWrite,      ///< a recompute stops before an operator has written what it saved
  OwnOutput,      ///< a recompute stops where a C++ Function is saving its own output
  SwappedSlots,   ///< two tensors of one shape are handed out in the place of each other
  InnerInput,     ///< the input of an inner region comes back as zeros
  TaskEnd,        ///< what a backward did not read is kept when it ends
  KeptResult,     ///< a kept call gets the result of another one
  KeptDraws,      ///< a replay does not pass over what kept calls drew

  WrittenArgument,   ///< a recompute may write into what hooks keep for an argument
  ReplacedArgument,  ///< nobody looks whether an argument got other storage
  ArgumentObject,    ///< a leaf argument comes back as another object, without its grad
  HookTwice,         ///< what a recompute registers on tensors from outside stays

  BufferBegin,    ///< a recompute sees a buffer as it is now
  BufferEnd,      ///< a buffer stays as a recompute leaves it
  BufferVersion,  ///< what a recompute writes to a buffer stays in its version
  BufferLayout,   ///< a buffer that was given other data keeps them in a recompute
  BufferStop,     ///< a recompute stops before the last write to a buffer
  BufferCompare,  ///< nobody looks whether a recompute left what forward left
  BufferStart,    ///< no recompute begins from what forward left
  BufferKept,     ///< what a buffer held that forward did not write to is kept
  BufferInside,   ///< a region does not note the modules of what runs plainly in it
};

#ifdef REMAT_PLANTED_FAULTS
/// The environment variable REMAT_PLANTED_FAULT chooses one by its number.
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
