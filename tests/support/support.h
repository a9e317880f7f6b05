#pragma once
// The one header a test file needs: Catch2, tensors, autograd, remat, and the tools below.
//
//   leaf({2, 2})                       a random leaf that requires grad
//   grad_of(y, {x}, {.create_graph})   torch::autograd::grad of y with grad ones
//   require_same_grads(plain, checkpointed, x, y)
//                                      runs both on copies of x, y from one seed and requires
//                                      bit-equal outputs, `requires_grad`s, input and parameter
//                                      grads, and CPU generator states
//   Calls calls; ... calls(); ... calls.count()            how often a region's function ran
//   ExpectedCalls once(1, "unpack"); ... once();           checks itself when it dies
//   Alive alive; auto probe = alive.probe(); alive.count() instances of probe; checks 0 at its end
//   LiveBytes bytes; ... bytes.held(), bytes.peak()        exact tensor bytes since it was made
//   OpCounter ops; ... ops.count("aten::sin")              operator calls (also those cut short)
//   KernelCounter kernels; ... kernels.count("sin")        CPU kernels that really ran
//   graph_dies(f), nodes_below(y), WeakGraph               weak references to graph nodes
//   contains("text"), error_of<T>(f)                       matches a text; returns the error itself
//   Seed seed(7);                      seeds the CPU generator, reports it with a failure, restores
//   first_then(calls, f, g)            f the first time, then g: a recompute that differs
//   mismatch_of(y, x)                  the error of a backward that must leave nothing
//   leftovers(), Baseline, Unchanged   leftovers of tests, which main.cpp looks for after each
//
// Not here, because they cost compile time: saved_tensors.h (reads saved tensors of nodes),
// nn.h (torch::nn). Tags: a case tagged [leaves-bytes] may leave tensor bytes behind.

#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

// All but module.h and sequential.h, which include torch::nn: those come with nn.h.
#include "remat/checkpoint.h"
#include "remat/error.h"
#include "remat/hooks.h"
#include "remat/memory.h"
#include "remat/options.h"
#include "remat/plan.h"
#include "remat/policy.h"
#include "remat/report.h"
#include "remat/scope.h"
#include "remat/state.h"
#include "remat/version.h"
#include "tests/support/catch.h"
#include "tests/support/counting.h"
#include "tests/support/errors.h"
#include "tests/support/gradients.h"
#include "tests/support/graph_nodes.h"
#include "tests/support/leftovers.h"

// Test files are programs: they may use these names unqualified.
using namespace remat::testing;  // NOLINT
