#!/usr/bin/env python3
"""remat beside Python's own hooks and checkpoints in one process (Rule 16).

Every case runs twice: in a process that used remat before it imported torch, so that torch put its own engine over
ours, and in one that imported torch first. Prints a line a case; the last line is `N passed, N failed`.
"""
import functools
import gc
import subprocess
import sys
import threading
import traceback
import warnings

import remat_python as remat

ORDERS = {"remat first": True, "torch first": False}

if __name__ == "__main__" and len(sys.argv) < 2:
    answers = [subprocess.run([sys.executable, __file__, order], stdout=subprocess.PIPE, text=True) for order in ORDERS]
    lines = []
    for order, answer in zip(ORDERS, answers):
        found = answer.stdout.splitlines()
        if answer.returncode not in (0, 1):
            found.append(f"FAILED: the process of '{order}' ended with status {answer.returncode}")
        lines += [f"[{order}] {line}" for line in found]
    print(*lines, sep="\n")
    passed = sum("] ok: " in line for line in lines)
    failed = sum("] FAILED: " in line for line in lines)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0 or passed == 0)

REMAT_FIRST = ORDERS[sys.argv[1]]
if REMAT_FIRST:
    assert "torch" not in sys.modules
    assert remat.native_gradient_is_right()  # opens hooks and regions, and runs a backward

warnings.filterwarnings("ignore", message="Failed to initialize NumPy|Anomaly Detection has been enabled")
import torch  # noqa: E402
import torch.utils.checkpoint as upstream  # noqa: E402
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

# ---- tools ---------------------------------------------------------------------------------------


def check(condition, *values):
    if not condition:
        raise AssertionError(values)


def equal(found, expected):
    check(found == expected, found, "instead of", expected)


class Calls:
    """A function that counts its calls."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *tensors):
        self.count += 1
        return self.function(*tensors)


class CountingPythonHooks(saved_tensors_hooks):
    """Python's own guard, with functions that count and really change what is stored."""

    def __init__(self):
        self.packs = self.unpacks = 0

        def pack(tensor):
            self.packs += 1
            return tensor.detach() * 2

        def unpack(packed):
            self.unpacks += 1
            return packed / 2

        super().__init__(pack, unpack)

    def __enter__(self):
        super().__enter__()
        return self


def leaf(size=8):
    torch.manual_seed(0)
    return torch.randn(size, size).requires_grad_()


def gradient_of(function, x=None):
    x = leaf() if x is None else x
    return torch.autograd.grad(function(x).sum(), x)[0]


def same_gradient(function, reference):
    check(torch.equal(gradient_of(function), gradient_of(reference)), "gradients differ")


def operators(x):
    return x.sin().exp().sin().matmul(x).tanh()


def with_dropout(x):
    return torch.nn.functional.dropout(x.sin(), 0.5).exp() * x


def raises(kind, text, function):
    try:
        function()
    except kind as error:
        check(type(error) is kind, type(error), "instead of", kind)
        check(text in str(error), str(error), "lacks", text)
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def ours(function):
    return lambda *tensors: remat.checkpoint(function, *tensors)


def save_matmuls():
    return upstream.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


THEIRS = {
    "plain": dict(),
    "debug": dict(debug=True),
    "selective": dict(context_fn=save_matmuls),
    "without early stop": dict(early_stop=False),
}


def theirs(function, **options):
    if options.get("early_stop") is False:

        def run(*tensors):
            with upstream.set_checkpoint_early_stop(False):
                return upstream.checkpoint(function, *tensors, use_reentrant=False)

        return run
    return lambda *tensors: upstream.checkpoint(function, *tensors, use_reentrant=False, **options)


CASES = []


def case(function):
    CASES.append((function.__name__.replace("_", " "), function))
    return function


def case_of_theirs(function):
    """One case for each way to call torch.utils.checkpoint."""
    for name, options in THEIRS.items():
        title = f"{function.__name__.replace('_', ' ')} ({name})"
        CASES.append((title, lambda options=options: function(options)))
    return function


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

    for region in (ours(operators), ours(theirs(operators)), theirs(ours(operators)), remat.native_region):
        check(torch.equal(twice(region), twice(remat.native_plain if region is remat.native_region else operators)))


@case
def a_backward_inside_a_region_works():
    def inner(x):
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            return x * torch.autograd.grad(ours(operators)(y).sum(), y)[0]

    same_gradient(ours(inner), inner)
    same_gradient(theirs(ours(inner)), inner)


# A backward in C++ before the import starts the engine's threads for another engine than Python's, which then crashes
# when backward calls nest deeper than 60; without remat too.
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
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(16, 8))
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
    for region in (ours, theirs, lambda block: ours(theirs(block)), lambda block: theirs(ours(block))):
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


# ---- hooks ---------------------------------------------------------------------------------------


@case
def our_hooks_see_what_Python_s_operators_save():
    with remat.CountingHooks() as hooks:
        same_gradient(operators, operators)
    equal((hooks.packs, hooks.unpacks), (12, 12))  # sin, exp, sin, both of matmul, tanh; twice
    gradient_of(operators)
    equal(hooks.packs, 12)


@case
def Python_s_hooks_hide_ours_and_ours_hide_theirs():
    x = leaf()
    with remat.CountingHooks() as outer:
        a = x.sin()
        with CountingPythonHooks() as inner:
            b = a.sin()
            with remat.CountingHooks() as innermost:
                c = b.sin()
            d = c.sin()
        e = d.sin()
    equal((outer.packs, inner.packs, innermost.packs), (2, 2, 1))
    gradient = torch.autograd.grad(e.sum(), x)[0]
    equal((outer.unpacks, inner.unpacks, innermost.unpacks), (2, 2, 1))
    check(torch.equal(gradient, gradient_of(lambda x: x.sin().sin().sin().sin().sin())))


@case
def Python_s_hooks_outside_a_region_see_its_inputs():
    function, hooks = Calls(operators), CountingPythonHooks()
    x = leaf()
    with hooks:
        y = ours(function)(x)
    equal(hooks.packs, 1)
    gradient = torch.autograd.grad(y.sum(), x)[0]
    equal((hooks.packs, hooks.unpacks, function.count), (1, 1, 2))
    check(torch.equal(gradient, gradient_of(operators)))


@case
def Python_s_hooks_inside_a_region_hide_its_hook():
    hooks = CountingPythonHooks()

    def function(x):
        y = x.sin()
        with hooks:
            z = y.sin()
        return z.sin()

    plain = lambda x: x.sin().sin().sin()  # noqa: E731
    x = leaf()
    y = ours(function)(x)
    equal(hooks.packs, 1)
    gradient = torch.autograd.grad(y.sum(), x)[0]
    equal((hooks.packs, hooks.unpacks), (2, 1))  # the recompute packs again, and that graph is dropped
    check(torch.equal(gradient, gradient_of(plain)))


@case
def our_hooks_around_and_inside_their_regions():
    with remat.CountingHooks() as outside:
        same_gradient(theirs(operators), operators)
    check(outside.packs > 0)
    inside = remat.CountingHooks()

    def function(x):
        y = x.sin()
        with inside:
            z = y.sin()
        return z.sin()

    same_gradient(theirs(function), lambda x: x.sin().sin().sin())
    equal(inside.unpacks, 1)


@case
def save_on_cpu_works_around_inside_and_beside_regions():
    def function(x):
        with save_on_cpu():
            return operators(x).sin()

    plain = lambda x: operators(x).sin()  # noqa: E731
    same_gradient(ours(function), plain)
    with save_on_cpu():
        y = ours(operators)(leaf()).sin()
        same_gradient(ours(plain), plain)
        with remat.CountingHooks():
            same_gradient(function, plain)
    y.sum().backward()
    same_gradient(function, plain)


@case
def disabling_in_Python_disables_ours():
    with disable_saved_tensors_hooks("not here"):
        raises(RuntimeError, "not here", remat.CountingHooks().__enter__)
        raises(RuntimeError, "not here", lambda: ours(operators)(leaf()))
        raises(RuntimeError, "not here", lambda: gradient_of(theirs(operators)))
        gradient_of(operators)
    same_gradient(ours(operators), operators)
    with remat.CountingHooks() as hooks:
        with disable_saved_tensors_hooks("inside"):
            same_gradient(operators, operators)
            equal(hooks.packs, 0)  # as LibTorch says: disabled hooks save plainly
        same_gradient(operators, operators)
    equal((hooks.packs, hooks.unpacks), (12, 12))


@case
def disabling_with_ours_disables_Python_s():
    with remat.DisableHooks("not there"):
        raises(RuntimeError, "not there", lambda: CountingPythonHooks().__enter__())
        raises(RuntimeError, "not there", lambda: gradient_of(theirs(operators)))
        with disable_saved_tensors_hooks("inner"):
            raises(RuntimeError, "inner", remat.CountingHooks().__enter__)
        raises(RuntimeError, "not there", remat.CountingHooks().__enter__)
    same_gradient(theirs(operators), operators)


@case
def hooks_that_are_active_cannot_be_disabled_and_stay_active():
    with CountingPythonHooks() as hooks:
        raises(RuntimeError, "no", remat.DisableHooks("no").__enter__)
        same_gradient(operators, operators)
    equal(hooks.packs, 12)
    with remat.CountingHooks() as hooks:
        raises(RuntimeError, "no", remat.DisableHooks("no").__enter__)
        same_gradient(operators, operators)
    equal(hooks.packs, 12)


@case
def our_hooks_belong_to_their_thread():
    found = []
    with remat.CountingHooks() as hooks:
        thread = threading.Thread(target=lambda: found.append(gradient_of(operators)))
        thread.start()
        thread.join()
        equal(hooks.packs, 0)
    check(torch.equal(found[0], gradient_of(operators)))


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
    same_gradient(theirs(lambda x: ours(function)(x.sin()).cos(), **options), lambda x: operators(x.sin()).cos())
    equal(function.count, 3)  # forward, their recompute, ours


@case_of_theirs
def their_region_inside_ours(options):
    function = Calls(operators)
    same_gradient(ours(lambda x: theirs(function, **options)(x.sin()).cos()), lambda x: operators(x.sin()).cos())
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


# ---- modes, errors, threads ----------------------------------------------------------------------


@case
def dispatch_modes_see_forward_and_recompute():
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Names() as forward:
        x = leaf()
        y = ours(operators)(x).sum()
    equal(forward.names.count("aten.exp.default"), 1)
    with Names() as backward:
        gradient = torch.autograd.grad(y, x)[0]
    equal(backward.names.count("aten.exp.default"), 1)
    check(torch.equal(gradient, gradient_of(operators)))


class Counting(TorchDispatchMode):
    """Counts the operators that come by, below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    def count(self, name):
        return self.names.count(name)


@case
def policies_work_beside_dispatch_modes_around_them():
    keeping = {"save_ops": ["aten::exp"]}
    with Counting() as forward:
        x = leaf()
        y = remat.checkpoint(operators, x, **keeping).sum()
    equal(forward.count("aten.exp.default"), 1)
    with Counting() as backward:
        gradient = torch.autograd.grad(y, x)[0]
    equal(backward.count("aten.exp.default"), 0)
    check(torch.equal(gradient, gradient_of(operators)))
    for _ in range(3):
        same_gradient(remat.native_selective_region, remat.native_plain)
    with Counting():
        same_gradient(remat.native_selective_region, remat.native_plain)
    equal(torch._C._len_torch_dispatch_stack(), 0)


@case
def kernels_under_a_policy_find_the_keys_that_they_find_without():
    def inverse(x):
        return torch.view_as_real(torch.linalg.pinv(x))

    # It conjugates lazily, in a kernel.
    values = torch.randn(4, 2, dtype=torch.complex128)
    x, plain = (values.clone().requires_grad_() for _ in range(2))
    result, expected = remat.checkpoint(inverse, x, save_ops=["aten::mm"]), inverse(plain)
    check(torch.equal(result, expected))
    result.sum().backward()
    expected.sum().backward()
    check(torch.equal(torch.view_as_real(x.grad.resolve_conj()), torch.view_as_real(plain.grad.resolve_conj())))

    def changes_what_is_saved(x):
        saved = x.tanh()
        torch._foreach_add_([saved], 1.0)
        equal(saved._version, 1)
        return saved.exp()

    result = remat.checkpoint(changes_what_is_saved, leaf(), save_ops=["aten::mm"]).sum()
    raises(RuntimeError, "modified by an inplace operation", result.backward)


@case
def policies_work_beside_dispatch_modes_inside_them():
    inside = Counting()

    def function(x):
        with inside:
            y = operators(x)
        return y.exp()

    same_gradient(lambda x: remat.checkpoint(function, x, save_ops=["aten::exp"]), lambda x: operators(x).exp())
    equal(inside.count("aten.exp.default"), 2)  # the mode is the inner one: it sees a replayed call, too
    equal(torch._C._len_torch_dispatch_stack(), 0)


@case
def policies_nest_with_upstream_selective_checkpointing():
    def policy(context, op, *args, **kwargs):
        kept = op == torch.ops.aten.exp.default
        return upstream.CheckpointPolicy.MUST_SAVE if kept else upstream.CheckpointPolicy.PREFER_RECOMPUTE

    def theirs_selective(function):
        contexts = functools.partial(upstream.create_selective_checkpoint_contexts, policy)
        return lambda x: upstream.checkpoint(function, x, use_reentrant=False, context_fn=contexts)

    def ours_selective(function):
        return lambda x: remat.checkpoint(function, x, save_ops=["aten::exp"])

    same_gradient(theirs_selective(ours_selective(operators)), operators)
    same_gradient(ours_selective(theirs_selective(operators)), operators)
    same_gradient(theirs_selective(ours(operators)), operators)
    same_gradient(ours_selective(theirs(operators)), operators)


@case
def anomaly_mode_works():
    with torch.autograd.detect_anomaly(check_nan=True):
        same_gradient(ours(operators), operators)
        same_gradient(remat.native_region, remat.native_plain)
        y = ours(lambda x: (x * 0).sqrt())(leaf())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raises(RuntimeError, "returned nan values", y.sum().backward)


@case
def an_exception_in_forward_keeps_its_type():
    class Refused(Exception):
        pass

    def function(x):
        x.sin().exp()
        raise Refused("not now")

    error = raises(Refused, "not now", lambda: ours(function)(leaf()))
    check("in function" in "".join(traceback.format_tb(error.__traceback__)), "the traceback is lost")
    raises(Refused, "not now", lambda: theirs(ours(function))(leaf()))
    raises(Refused, "not now", lambda: ours(theirs(function))(leaf()))
    raises(TypeError, "unknown option", lambda: remat.checkpoint(function, leaf(), colour="red"))


@case
def an_exception_in_a_recompute_keeps_its_type_and_backward_can_be_tried_again():
    class Refused(Exception):
        pass

    for wrap in (ours, lambda f: ours(theirs(f)), lambda f: theirs(ours(f))):
        angry = [False]

        def function(x):
            y = x.sin().exp()
            if angry[0]:
                raise Refused("in recompute")
            return y.matmul(x)

        x = leaf()
        y = wrap(function)(x).sum()
        angry[0] = True
        raises(Refused, "in recompute", lambda: torch.autograd.grad(y, x, retain_graph=True))
        raises(Refused, "in recompute", lambda: remat.native_backward(y))
        angry[0] = False
        check(torch.equal(torch.autograd.grad(y, x)[0], gradient_of(function)))


@case
def a_mismatch_is_a_clear_error_in_Python():
    runs = []

    def function(x):
        runs.append(1)
        return x.sin().exp() if len(runs) == 1 else x.sin()

    y = remat.checkpoint(function, leaf(), name="block 3")
    error = raises(RuntimeError, "A different number of tensors was saved", y.sum().backward)
    check("block 3" in str(error), str(error))


@case
def backward_runs_in_a_Python_thread():
    function, found = Calls(operators), []
    x = leaf()
    y = ours(theirs(function))(x).sum()

    def run():
        found.append(torch.autograd.grad(y, x)[0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    check(found and torch.equal(found[0], gradient_of(operators)))


@case
def many_threads_work_on_one_graph_and_on_their_own():
    def twice(x, region=lambda f: f):
        return region(operators)(x).exp()

    x, plain = leaf(), gradient_of(operators)
    expected = gradient_of(twice)
    shared = ours(lambda x: twice(x, ours))(x).sum()
    wrong, done = [], []

    def run():
        try:
            for _ in range(20):
                if not torch.equal(torch.autograd.grad(shared, x, retain_graph=True)[0], expected):
                    wrong.append("shared")
                mine = x.detach().clone().requires_grad_()
                if not torch.equal(gradient_of(theirs(ours(operators)), mine), plain):
                    wrong.append("own")
                with remat.CountingHooks(), CountingPythonHooks():
                    gradient_of(ours(operators), mine)
            done.append(True)
        except BaseException as error:  # noqa: BLE001
            wrong.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal((wrong, len(done)), ([], 4))


@case
def a_graph_may_die_in_any_thread():
    graphs = [ours(operators)(leaf()) for _ in range(20)]
    thread = threading.Thread(target=graphs.clear)
    thread.start()
    thread.join()
    equal(remat.counters()["frames_alive"], 0)


# ---- a device's graphs (where there is one) ---------------------------------------------------------


def captured(step):
    """What `step` gives as a captured graph, replayed; it is run three times before, as capture wants."""
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
    # LibTorch starts its device threads for the engine of the first backward, which another may replace.
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


# ---- running them --------------------------------------------------------------------------------


def leftovers():
    """What the case has left behind; the next one starts clean of what can be put right."""
    gc.collect()
    found = [f"{name} = {value}" for name, value in remat.counters().items() if name.endswith("alive") and value]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        found.append("Python's hooks")
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        found.append("hooks are disabled")
        torch._C._autograd._saved_tensors_hooks_enable()
    if remat.is_checkpointing() or remat.is_recomputing():
        found.append("a region is open")
    return found


def main():
    failed = False
    torch.set_num_threads(1)
    for name, run in CASES:
        fault = ""
        try:
            run()
        except BaseException:  # noqa: BLE001
            fault = traceback.format_exc()
        left = leftovers()
        if left and not fault:
            fault = "left behind: " + ", ".join(left)
        print(f"FAILED: {name}\n{fault}" if fault else f"ok: {name}", flush=True)
        failed = failed or bool(fault)
    return failed


sys.exit(main())
