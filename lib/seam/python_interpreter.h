#pragma once
// Python's own interpreter, once our dispatch mode is one of its objects.
//
// Note [A mode that is Python's]
// A mode knows its interpreter, and LibTorch hands an operator to that of the topmost mode. With an
// interpreter of our own we see operators natively. But LibTorch also asks the topmost mode of
// Python's about sizes of tensors whose class answers for them, and about operators of higher
// order, without looking whose mode that is: with ours, a failed assertion, where nothing may be
// thrown. So where a binding gives us an object of Python's, it is that object's reference that
// stands on the stack, and Python's interpreter gets a table of functions that forwards everything
// to the one it had, but for operators that our mode is the topmost to see. The interpreter stays
// the same object, which is all that LibTorch compares. Rejected: a dispatch key of our own.
// Operators of higher order refuse keys that they do not know, and modes that the function opens
// inside of the region would see operators after us.

#include <c10/core/impl/PyInterpreter.h>

namespace remat::seam {

/// Operators whose topmost mode is ours go to us from now on, where LibTorch hands them to
/// `python`. Any thread.
void look_into(c10::impl::PyInterpreter& python);

}  // namespace remat::seam
