#!/usr/bin/env python3
"""The program of docs/from-python.md: each part of the package once."""

import tempfile
import zlib
from pathlib import Path

import torch
import torch.nn as nn

import remat

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.BatchNorm1d(width)
        )

    def forward(self, x):
        return x + self.down(remat.checkpoint_name(self.up(self.norm(x)), "up").sin())


def new_model():
    return nn.Sequential(*(Block() for _ in range(6)))


x = torch.randn(64, 32)
block, model = Block(), new_model()

# ---- regions
y = remat.checkpoint(block, x)
y = remat.checkpoint(
    lambda a, scale: block(a) * scale, x, scale=2.0, name="block 3", modules=[block]
)


@remat.checkpoint(name="head", early_stop=False)
def head(x):
    return x.sin().square().mean()


head(y).backward()

# ---- the drop-in
remat.install()  # from here on torch.utils.checkpoint runs on remat, in the whole process
remat.uninstall()
with remat.installed():
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()

# ---- modules
layer = remat.Checkpointed(Block())  # the module itself; each call is a region
applied = remat.apply(model, types=Block, every=2)
applied = remat.apply(model, names="0|2|4", policy=remat.save_matmuls())
applied = remat.apply(model, "every=2,type=Block")  # from a configuration
print(applied)
model(x).sum().backward()
remat.remove(model)

# ---- what is kept
policy = remat.save_ops([torch.ops.aten.addmm]) | remat.save_names(["up"])
remat.checkpoint(block, x, policy=policy).sum().backward()


def routed(x):
    best = remat.pin(x.topk(4).indices)  # recomputes go on with these
    return remat.save_region(torch.sin, x).gather(1, best)


remat.checkpoint(routed, x.clone().requires_grad_()).sum().backward()

# ---- guards
with tempfile.TemporaryDirectory() as folder:
    with remat.save_on_disk(Path(folder)):
        loss = model(x).sum()
    with remat.recompute_cache(max_bytes=64_000_000):
        loss.backward()


class Compressed:
    def store(self, flat):
        packed = zlib.compress(bytes(flat.tolist()), level=1)
        return packed if len(packed) < flat.numel() else None  # None: it stays

    def load(self, packed):
        return torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)


with remat.save_elsewhere(Compressed(), min_bytes=1 << 14):
    model(x).sum().backward()

# ---- seeing
meter = remat.MemoryMeter()
with remat.Recorder() as recorder:
    remat.checkpoint(block, x, name="block").sum().backward()
print(recorder.report())
for unused in remat.unused_regions(model, model(x).sum()):
    print(unused.path, unused.cure)
print(
    meter.peak_bytes, "bytes at the peak;", len(remat.saved_tensors(block(x))),
    "tensors saved by a block"
)

# ---- plans
stages = [*model, lambda x: x.square().mean()]
fitted = remat.fit(stages, x, budget_bytes=300_000)
print(fitted)
fitted(x).backward()

cost = remat.measure(stages, x)
frontier = remat.solve(cost)
plan = frontier.plan(frontier.points[0].bytes)
remat.run(plan, stages, x).backward()
print("the least memory:", plan)

with tempfile.TemporaryDirectory() as folder:
    moving = remat.MoveOptions(directory=folder)  # none, for an accelerator: on the CPU
    fitted = remat.fit(stages, x, budget_bytes=300_000, moving=moving)
    remat.run(remat.Plan.parse("[mv[1] mv[ck[2 3]] 4 5 6 7]"), stages, x, moving=moving).backward()
