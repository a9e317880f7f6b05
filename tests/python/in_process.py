"""Cases of remat beside Python's own hooks and checkpoints in one process, and how they are run.

Every case runs twice: in a process that used remat before it imported torch, so that torch put its
own engine over ours, and in one that imported torch first. Prints a line a case; the last line is
`N passed, N failed`.
"""
import gc
import subprocess
import sys
import traceback
import warnings

import remat_python as remat

ORDERS = {"remat first": True, "torch first": False}

if len(sys.argv) < 2:
    answers = [subprocess.run([sys.executable, sys.argv[0], order], stdout=subprocess.PIPE,
                              text=True) for order in ORDERS]
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

warnings.filterwarnings("ignore",
                        message="Failed to initialize NumPy|Anomaly Detection has been enabled")
import torch  # noqa: E402
import torch.utils.checkpoint as upstream  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

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


# ---- running them --------------------------------------------------------------------------------


def leftovers():
    """Returns the leftovers of the case; the next one starts clean of those that can be put
    right."""
    gc.collect()
    found = [f"{name} = {value}" for name, value in remat.counters().items()
             if name.endswith("alive") and value]
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
