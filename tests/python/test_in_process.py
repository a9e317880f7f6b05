#!/usr/bin/env python3
"""remat beside Python's own hooks and checkpoints in one process (Rule 16): regions of both kinds,
captured graphs."""
import sys

from in_process import (
    REMAT_FIRST,
    Calls,
    case,
    case_of_theirs,
    check,
    equal,
    gradient_of,
    leaf,
    main,
    operators,
    ours,
    raises,
    same_gradient,
    theirs,
    with_dropout,
)  # first: it imports remat and torch in the order under test

import remat_python as remat
import torch
import torch.utils.checkpoint as upstream

# ---- our regions ---------------------------------------------------------------------------------


@case
def a_region_of_Python_code_recomputes_once():
    function = Calls(operators)
    before = remat.counters()
    same_gradient(ours(function), operators)
    equal(function.count, 2)
    equal(remat.counters()["recomputes"] - before["recomputes"], 1)


@case
def a_region_of_C_plus_plus_code_works_in_Python_s_backward_and_ours():
    before = remat.num_native_runs()
    same_gradient(remat.native_region, remat.native_plain)
    x = leaf()
    remat.native_backward(remat.native_region(x).sum())
    check(torch.equal(x.grad, gradient_of(remat.native_plain)))
    check(remat.native_gradient_is_right())
    equal(remat.num_native_runs() - before, 6)


@case
def a_C_plus_plus_backward_runs_regions_of_Python_code():
    x, function = leaf(), Calls(operators)
    remat.native_backward(theirs(ours(function))(x).sum())
    check(torch.equal(x.grad, gradient_of(operators)))


@case
def early_stop_works_in_Python_s_backward():
    x = leaf(128)
    for enabled in (True, False):
        before = remat.counters()["early_stops"]
        with remat.EarlyStop(enabled):
            y = remat.native_region(x).sum()
        gradient = torch.autograd.grad(y, x)[0]
        equal(remat.counters()["early_stops"] - before, int(enabled))
        check(torch.equal(gradient, gradient_of(remat.native_plain, x)))


@case
def a_retained_graph_recomputes_again():
    x, function = leaf(), Calls(operators)
    y = ours(function)(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x)[0]
    equal(function.count, 3)
    check(torch.equal(first, second) and torch.equal(first, gradient_of(operators)))


@case
def double_backward_goes_through_regions():
    def twice(function):
        x = leaf()
        first = torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    for region in (ours(operators), ours(theirs(operators)), theirs(ours(operators)),
                   remat.native_region):
        check(torch.equal(twice(region), twice(remat.native_plain if region is remat.native_region
                                               else operators)))


@case
def a_backward_inside_a_region_works():
    def inner(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return x * torch.autograd.grad(ours(operators)(y).sum(), y)[0]

    same_gradient(ours(inner), inner)
    same_gradient(theirs(ours(inner)), inner)


# A backward in C++ before the import starts the engine's threads for another engine than Python's,
# which then crashes when backward calls nest deeper than 60; without remat too.
@(lambda function: function if REMAT_FIRST else case(function))
def eighty_backward_calls_inside_each_other_work():
    class Deeper(torch.autograd.Function):
        """Its backward runs another backward, and so on down."""

        @staticmethod
        def forward(ctx, x, depth):
            ctx.save_for_backward(x)
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            if ctx.depth == 0:
                return gradient, None
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                z = ours(lambda t: Deeper.apply(t.sin(), ctx.depth - 1))(y).sum()
            return gradient * torch.autograd.grad(z, y)[0], None

    def expected(x, depth):
        return torch.ones_like(x) if depth == 0 else expected(x.sin(), depth - 1) * x.cos()

    x = torch.full((3,), 0.3).requires_grad_()
    check(torch.equal(gradient_of(lambda t: Deeper.apply(t, 80), x), expected(x.detach(), 80)))


@case
def random_numbers_are_drawn_again():
    def run(function):
        x = leaf()
        torch.manual_seed(7)
        gradient = torch.autograd.grad(function(x).sum(), x)[0]
        return gradient, torch.rand(3)

    expected, after = run(with_dropout)
    for region in (ours(with_dropout), ours(theirs(with_dropout)), theirs(ours(with_dropout))):
        gradient, then = run(region)
        check(torch.equal(gradient, expected) and torch.equal(then, after))


@case
def a_model_trains_as_without_regions():
    def train(region):
        torch.manual_seed(1)
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.GELU(),
                                torch.nn.Linear(16, 8))
            for _ in range(4)
        ]
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        for _ in range(5):
            x = torch.randn(4, 8)
            for block in blocks:
                x = region(block)(x)
            x.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    plain = train(lambda block: block)
    for region in (ours, theirs, lambda block: ours(theirs(block)),
                   lambda block: theirs(ours(block))):
        check(torch.equal(train(region), plain))


@case
def a_Python_autograd_Function_may_be_inside():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * x
            ctx.save_for_backward(x, y)
            return y * x

        @staticmethod
        def backward(ctx, gradient):
            x, y = ctx.saved_tensors
            check(torch.equal(y, x * x))
            return 3 * y * gradient

    def function(x):
        return Cube.apply(x.sin()).exp()

    for region in (ours(function), ours(theirs(function)), theirs(ours(function))):
        same_gradient(region, function)


@case
def reading_a_saved_tensor_by_hand_recomputes_for_it_alone():
    x, function = leaf(), Calls(lambda x: x.sin().exp())
    y = ours(function)(x)
    check(torch.equal(y.grad_fn._saved_result, x.sin().exp()))
    equal(function.count, 2)
    equal(remat.counters()["recomputed_bytes_alive"], 0)


@case
def a_region_without_grad_mode_runs_plainly():
    function, before = Calls(operators), remat.counters()["frames_created"]
    with torch.no_grad():
        ours(function)(leaf())
    with torch.inference_mode():
        ours(function)(leaf())
    with remat.DisableCheckpoint():
        same_gradient(ours(function), operators)
    equal(function.count, 3)
    equal(remat.counters()["frames_created"], before)


@case
def the_phase_is_seen_from_Python():
    seen = []

    def function(x):
        seen.append((remat.is_checkpointing(), remat.is_recomputing()))
        return x.sin()

    gradient_of(ours(function))
    equal(seen, [(True, False), (False, True)])


@case
def Python_s_profiler_shows_regions_and_recomputes_under_their_names():
    def seen(function, backward=True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = function(leaf()).sum()
            if backward:
                y.backward()
        return [event.name for event in profile.events() if event.name.startswith("block 3")]

    def region(x):
        return remat.checkpoint(operators, x, name="block 3")

    equal(seen(region), ["block 3 (forward)", "block 3"])
    equal(seen(region, backward=False), ["block 3 (forward)"])
    equal(seen(operators), [])
    same_gradient(region, operators)


# ---- both kinds of regions -----------------------------------------------------------------------


@case_of_theirs
def their_regions_work_while_our_hooks_are_alive_and_after(options):
    function = Calls(operators)
    with remat.CountingHooks() as hooks:
        same_gradient(theirs(function, **options), operators)
        equal(function.count, 2)
        check(hooks.packs > 6)  # the plain run saves six
    same_gradient(theirs(function, **options), operators)
    equal(function.count, 4)


@case_of_theirs
def our_region_inside_theirs(options):
    function = Calls(operators)
    same_gradient(theirs(lambda x: ours(function)(x.sin()).cos(), **options),
                  lambda x: operators(x.sin()).cos())
    equal(function.count, 3)  # forward, their recompute, ours


@case_of_theirs
def their_region_inside_ours(options):
    function = Calls(operators)
    same_gradient(ours(lambda x: theirs(function, **options)(x.sin()).cos()),
                  lambda x: operators(x.sin()).cos())
    equal(function.count, 3)


@case_of_theirs
def regions_nested_in_turn(options):
    def nested(depth, outer, inner, x):
        if depth == 0:
            return operators(x)
        return outer(lambda y: nested(depth - 1, inner, outer, y.sin()).cos())(x)

    def mine(function):
        return ours(function)

    def other(function):
        return theirs(function, **options)

    plain = lambda x: nested(4, lambda f: f, lambda f: f, x)  # noqa: E731
    same_gradient(lambda x: nested(4, mine, other, x), plain)
    same_gradient(lambda x: nested(4, other, mine, x), plain)


@case_of_theirs
def regions_in_a_chain_and_a_native_one_in_theirs(options):
    def chain(first, second, native):
        return lambda x: second(operators)(native(first(operators)(x)))

    plain = chain(lambda f: f, lambda f: f, remat.native_plain)
    other = lambda f: theirs(f, **options)  # noqa: E731
    same_gradient(chain(ours, other, remat.native_region), plain)
    same_gradient(chain(other, ours, remat.native_region), plain)
    same_gradient(other(chain(ours, other, remat.native_region)), plain)
    with remat.CountingHooks():
        same_gradient(ours(chain(other, ours, remat.native_region)), plain)


@case
def their_reentrant_regions_work_beside_ours():
    def reentrant(function):
        return lambda x: upstream.checkpoint(function, x, use_reentrant=True)

    def by_backward(function):
        x = leaf()
        function(x).sum().backward()
        return x.grad

    expected = by_backward(operators)
    check(torch.equal(by_backward(reentrant(ours(operators))), expected))
    with remat.CountingHooks():
        check(torch.equal(by_backward(reentrant(operators)), expected))


# ---- a device's graphs (where there is one) ------------------------------------------------------


def captured(step):
    """Returns the result of `step` as a captured graph, replayed; `step` runs three times before,
    as capture requires."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    return graph, found


@case
def a_captured_graph_holds_forward_and_recompute():
    # LibTorch starts its device threads for the engine of the first backward, which another may
    # replace.
    if not torch.cuda.is_available() or REMAT_FIRST:
        return
    x = leaf().cuda().detach().requires_grad_()
    for region in (
        lambda y: remat.checkpoint(operators, y, preserve_rng_state=False),
        lambda y: remat.checkpoint(operators, y, preserve_rng_state=False, save_ops=["aten::mm"]),
    ):
        graph, found = captured(lambda: gradient_of(region, x))
        check(torch.equal(found, gradient_of(operators, x)), "captured")
        with torch.no_grad():
            x.data.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        check(torch.equal(found, gradient_of(operators, x)), "replayed with other numbers")


@case
def a_graph_cannot_be_captured_with_the_device_s_random_state():
    if not torch.cuda.is_available() or REMAT_FIRST:
        return
    x = leaf().cuda().detach().requires_grad_()

    def attempt():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ours(operators)(x)

    ours(operators)(x)
    error = raises(RuntimeError, "preserve_rng_state", attempt)
    check("captur" in str(error), str(error))
    torch.cuda.synchronize()
    same = gradient_of(ours(operators), x)
    check(torch.equal(same, gradient_of(operators, x)), "after the failed capture")


sys.exit(main())
