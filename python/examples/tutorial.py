#!/usr/bin/env python3
"""The program of docs/tutorial.md: a training loop that does not fit into memory, and ways to make
it fit.

    tutorial.py [STEP...]    these steps of the page; without a name all, in the order of the page
"""

import functools
import random
import sys
import textwrap
from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F

import remat

LIMIT = 16_000_000  # [bytes]


# ---- a training loop


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def run_blocks(blocks, x):
    for block in blocks:
        x = block(x)
    return x


class Model(nn.Module):
    """16 blocks. The steps replace `run`."""

    def __init__(self, run=run_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(16))
        self.run = run

    def forward(self, x):
        return self.run(self.blocks, x)


@functools.cache
def loader():
    """Three batches: inputs (1024, 32) and targets of the same shape."""
    torch.manual_seed(1)
    inputs = [torch.randn(1024, 32) for _ in range(3)]
    return [(x, x.sin()) for x in inputs]


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for x, y in loader():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


# ---- what the steps share


def new_model(run=run_blocks):
    torch.manual_seed(0)
    return Model(run)


@functools.cache
def plain_parameters():
    """The parameters after a training without remat."""
    model = new_model()
    train(model)
    model.zero_grad()
    return list(model.parameters())


def print_wrapped(text):
    """Prints a text with two columns of margin, in lines of at most 98 characters."""
    for line in text.splitlines():
        words = " ".join(line.split())
        print(
            textwrap.fill(
                words, 98, initial_indent="  ", subsequent_indent="  ", break_long_words=False,
                break_on_hyphens=False
            )
        )


def train_under_limit(model):
    """Trains the model under the limit, and prints the loss and the peak."""
    meter = remat.MemoryMeter()
    before = meter.live_bytes
    with remat.memory_limit(before + LIMIT):
        loss = train(model)
    peak = meter.peak_bytes - before
    equal = all(map(torch.equal, model.parameters(), plain_parameters()))
    print(
        f"  loss {loss:.3f}, peak {peak / 1e6:.2f} MB, parameters bit-equal: "
        f"{'yes' if equal else 'no'}"
    )


def train_with(run):
    """The same with the blocks run by `run`; also prints the counts of the regions."""
    with remat.Recorder() as recorder:
        train_under_limit(new_model(run))
    for region in recorder.report().regions:
        print(
            f"  {region.name}: {region.calls} calls, {region.recomputes} recomputes, "
            f"{region.bytes_dropped / 1e6:.2f} MB dropped"
        )
        for each in region.decisions:
            print(f"    {each.op}: {each.calls} {each.outcome}")


# ---- the steps


def limit():
    model = new_model()
    meter = remat.MemoryMeter()
    try:
        with remat.memory_limit(meter.live_bytes + LIMIT):
            train(model)
    except torch.OutOfMemoryError as error:
        print_wrapped(str(error))


def measure():
    model = new_model()
    with remat.budget(sys.maxsize) as no_limit:
        train(model)
    report = no_limit.report()
    print(f"  peak {report.peak_bytes / 1e6:.2f} MB, floor {report.floor_bytes / 1e6:.2f} MB")


def saved():
    block = Block(32)
    y = block(loader()[0][0])
    bytes_of = Counter()
    for saved in remat.saved_tensors(y):
        if not saved.shares_storage:
            bytes_of[saved.node] += saved.bytes
    for node, size in sorted(bytes_of.items()):
        print(f"  {node}: {size} bytes")


def budget():
    model = new_model()
    with remat.budget("16 MB") as budget:
        train_under_limit(model)
    print_wrapped(str(budget.report()))


def run_regions(blocks, x):
    for block in blocks:
        x = remat.checkpoint(block, x, name="block")
    return x


def run_nested(blocks, x):
    for i in range(0, len(blocks), 4):
        x = remat.checkpoint(run_regions, blocks[i : i + 4], x, name="group")
    return x


def run_with_policy(blocks, x):
    for block in blocks:
        x = remat.checkpoint(block, x, name="block", policy=remat.save_matmuls())
    return x


def plan():
    model = new_model()
    sample = loader()[0][0]
    fitted = remat.fit(list(model.blocks), sample, budget_bytes=12_000_000)
    print(f"  {fitted.plan}")
    print(
        f"  predicted peak {fitted.peak_bytes / 1e6:.2f} MB, measured "
        f"{fitted.measured_bytes / 1e6:.2f} MB"
    )

    model.run = lambda blocks, x: fitted(x)
    train_under_limit(model)


# ---- mistakes


def print_error(action):
    """Runs an action, and prints the error that it raises."""
    try:
        action()
        print("  no error")
    except RuntimeError as error:
        print_wrapped(str(error))


def ones():
    return torch.ones(1024, 32, requires_grad=True)


def captures_a_tensor_that_changes():
    block, x = Block(32), ones()

    def mistake():
        scale = torch.ones(())
        y = remat.checkpoint(lambda t: block(t * scale), x, name="scaled")
        scale.mul_(0.9)  # before backward
        y.sum().backward()

    def fixed():
        scale = torch.ones(())
        y = remat.checkpoint(lambda t: block(t * scale), x, name="scaled")
        scale = scale * 0.9  # a new tensor
        y.sum().backward()

    print_error(mistake)
    print_error(fixed)


def takes_another_path():
    block, x = Block(32), ones()
    random.seed(10)

    def skips(t):
        return t if random.random() < 0.5 else block(t)  # stochastic depth

    def skips_by_torch(t):
        return t if torch.rand(()) < 0.5 else block(t)

    print_error(lambda: remat.checkpoint(skips, x, name="skips").sum().backward())
    print_error(lambda: remat.checkpoint(skips_by_torch, x, name="skips").sum().backward())


def writes_to_its_argument():
    block, x = Block(32), ones()

    def relu_first(t):
        return block(t.relu_())

    def run(**options):
        remat.checkpoint(relu_first, block(x), name="relu first", **options).sum().backward()

    print_error(run)
    print_error(lambda: run(input_mode="copy_on_write"))


def budget_below_the_floor():
    model = new_model()

    def mistake():
        with remat.budget("1 MB", over="throw"):
            train(model)

    print_error(mistake)


STEPS = {
    "limit": limit,
    "measure": measure,
    "saved": saved,
    "budget": budget,
    "regions": lambda: train_with(run_regions),
    "nested": lambda: train_with(run_nested),
    "policy": lambda: train_with(run_with_policy),
    "plan": plan,
    "capture": captures_a_tensor_that_changes,
    "path": takes_another_path,
    "argument": writes_to_its_argument,
    "floor": budget_below_the_floor,
}

if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in STEPS]
    if unknown:
        sys.exit(f"tutorial.py: there is no step {unknown[0]!r}. Steps: {' '.join(STEPS)}")
    torch.set_num_threads(1)  # some kernels allocate memory for each thread
    plain_parameters()
    for name, step in STEPS.items():
        if name in (sys.argv[1:] or STEPS):
            print(name)
            step()
