#pragma once
// Runs a frame's function again: fills slots, stops early, fails cleanly.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>

#include "lib/frame/recomputed_values.h"

namespace remat {

class Frame;

/// Recomputes into `run`: every slot that is alive, or `only_position` alone if it is not
/// negative. On return the slots are filled and compared; otherwise it throws, with nothing left
/// behind but what `run` already held. No lock is held.
void recompute(const c10::intrusive_ptr<Frame>& frame, Run& run, int64_t only_position = -1);

/// A backward begins on this thread: recomputes that this thread runs cannot go on before it ends,
/// so nobody may wait for them any more (a waiting thread could be the one that backward needs).
/// Throws CheckpointError if a recompute cannot repeat it (Note [SharedRecomputes inside a region]), or if it
/// asks a kept value for what no recompute knows.
void backward_begins(const torch::autograd::edge_list& roots,
                     const torch::autograd::edge_list& targets, bool accumulates);

/// It has ended; `gradients`: what it returns, none if it threw; `given`: those of its roots. Throws
/// nothing.
void backward_ended(const torch::autograd::variable_list& gradients,
                    const torch::autograd::variable_list& given);

}  // namespace remat
