#!/usr/bin/env python3
"""remat beside Python in one process (Rule 16): Python's hooks, dispatch modes, errors and
threads."""
import functools
import sys
import threading
import traceback
import warnings

from in_process import (
    Calls,
    CountingPythonHooks,
    case,
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
)  # first: it imports remat and torch in the order under test

import remat_python as remat
import torch
import torch.utils.checkpoint as upstream
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

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
    # the recompute packs again, and that graph is dropped
    equal((hooks.packs, hooks.unpacks), (2, 1))
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
    check(torch.equal(torch.view_as_real(x.grad.resolve_conj()),
                      torch.view_as_real(plain.grad.resolve_conj())))

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

    same_gradient(lambda x: remat.checkpoint(function, x, save_ops=["aten::exp"]),
                  lambda x: operators(x).exp())
    # the mode is the inner one: it sees a replayed call, too
    equal(inside.count("aten.exp.default"), 2)
    equal(torch._C._len_torch_dispatch_stack(), 0)


@case
def policies_nest_with_upstream_selective_checkpointing():
    def policy(context, op, *args, **kwargs):
        kept = op == torch.ops.aten.exp.default
        answers = upstream.CheckpointPolicy
        return answers.MUST_SAVE if kept else answers.PREFER_RECOMPUTE

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
    check("in function" in "".join(traceback.format_tb(error.__traceback__)),
          "the traceback is lost")
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


sys.exit(main())
