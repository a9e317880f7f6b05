"""remat.budget on two ranks with different budgets: gradients in common, shards, tensor parallel.

Each program runs on two processes over Gloo, plain, with budgets, and with budgets that move values
to a file. Each rank drops and runs again on its own: no rank may wait for another one in a rerun,
and results are equal.
"""

from __future__ import annotations

import unittest

import torch

from common import Case, run_script, sampled

RANKS = """
import os, sys, tempfile, torch, torch.multiprocessing as mp, torch.distributed as dist
import torch.nn.functional as F
import remat
from torch import nn

WIDTH = 32

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))

class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        for block in self.blocks:
            x = block(x).sin()
        return self.head(self.norm(x)).tanh()

def train(net, steps=4, accumulate=None):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if accumulate is not None:
            with accumulate():
                net(torch.randn(64, WIDTH)).square().mean().backward()
        loss = net(torch.randn(64, WIDTH)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses, [each.detach() for each in net.parameters()], list(net.buffers())

def data_parallel(**options):
    torch.manual_seed(1)
    net = nn.parallel.DistributedDataParallel(Net(norm=True), **options)
    return train(net, accumulate=net.no_sync)

def of_shards(reshard, mixed=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    net = Net()
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if mixed else ()))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(net, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    losses, parameters, buffers = train(net)
    return losses, [each.full_tensor() for each in parameters], buffers

def tensor_parallel(sequence):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput,
        RowwiseParallel, SequenceParallel, parallelize_module)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    net = Net()
    for block in net.blocks:
        if sequence:
            plan = {"norm": SequenceParallel(sequence_dim=0),
                    "up": ColwiseParallel(input_layouts=Shard(0)),
                    "down": RowwiseParallel(output_layouts=Shard(0)),
                    "drop": SequenceParallel(sequence_dim=0)}
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    if sequence:
        shards = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
        plan = {"blocks.0": shards,
                "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())}
        parallelize_module(net, mesh, plan)
    seeded = torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = net(torch.randn(64, WIDTH, generator=seeded)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    whole = lambda each: each.full_tensor() if isinstance(each, DTensor) else each
    return losses, [whole(each.detach()) for each in net.parameters()], []

class ReducedHalves(torch.autograd.Function):  # as Megatron: a sum over ranks in place
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x
    @staticmethod
    def backward(ctx, gradient):
        return gradient

def collectives():
    import torch.distributed.nn.functional as with_gradients
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    w = torch.randn(64, 64, requires_grad=True)
    results = []
    for step in range(3):
        y = w.sin()
        z = y.exp() * w                           # saves y
        y2 = (w * 0.5).tanh()
        out = y2 * z
        with torch.no_grad():
            dist.all_reduce(y2.data)              # what backward reads, without a new version
        a = (w.detach() * 2).cos()
        work = dist.all_reduce(a, async_op=True)
        work.wait()
        out = out + a.sin() * w + (a * w).exp().cos()
        parts = [torch.empty(64, 64) for _ in range(2)]
        dist.all_gather(parts, w.detach().cos())
        out = out * parts[0].tanh() + (parts[1] * w).sin()
        b = w.detach().sin() + rank
        dist.broadcast(b, 0)
        out = ReducedHalves.apply(out.sigmoid() * b) * b.cos()
        out = out + with_gradients.all_reduce(out.sin())
        flat = torch.empty(2 * 64, 64)
        dist.all_gather_into_tensor(flat, (out.detach() + 1).sin())
        out = (out * flat[:64]).sin() + (w * flat[64:]).tanh()
        del y, z, y2, a, b, parts, flat
        for _ in range(5):
            out = out.sin().exp()
        (slope,) = torch.autograd.grad(out.sum(), w)
        results += [out.detach(), slope]
        with torch.no_grad():
            w.sub_(slope, alpha=1e-3)
        del out
    return results, [w.detach()], []

PROGRAMS = {
    "DDP": lambda: data_parallel(),
    "DDP with views": lambda: data_parallel(gradient_as_bucket_view=True, bucket_cap_mb=0.01),
    "shards": lambda: of_shards(True),
    "shards kept": lambda: of_shards(False),
    "shards in bfloat16": lambda: of_shards(True, mixed=True),
    "tensor parallel": lambda: tensor_parallel(False),
    "sequence parallel": lambda: tensor_parallel(True),
    "collectives": collectives,
}

def leaves(found):
    for each in found:
        yield from leaves(each) if isinstance(each, (list, tuple)) else [each]

def worker(rank, path, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    program = PROGRAMS[name]
    plain = [*leaves(program()), torch.get_rng_state()]
    span, said = 0, []
    moving = remat.MoveOptions(directory=os.path.dirname(path), min_bytes=0)
    shares = ((1e9, 1e9), (0.5, 0.25), (0.25, 0.8), (0.1, 1e9))
    for share, place in [*((each[rank], None) for each in shares),
                         *((each[rank], moving) for each in shares[1:3])]:
        bytes = int(span * share) or 1 << 60
        with remat.budget(bytes, min_bytes=0, moving=place) as budget:
            found = list(leaves(program()))
        report = budget.report()
        span = span or report.peak_bytes
        found.append(torch.get_rng_state())
        same = len(found) == len(plain) and all(map(torch.equal, found, plain))
        said.append(f"{'same' if same else 'DIFFERENT'} {report.evictions}/{report.reruns}")
        if report.over_count == 0 and report.peak_bytes > bytes: said.append("PEAK")
    os.write(1, f"rank {rank} {name}: {', '.join(said)}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            context = mp.get_context("fork")
            processes = [context.Process(target=worker, args=(rank, folder + "/store", name))
                         for rank in range(2)]
            for each in processes: each.start()
            for each in processes: each.join()
            print(name, "exit", [each.exitcode for each in processes], flush=True)
"""


class Ranks(Case):
    def check_programs(self, *names: str) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            self.skipTest("no Gloo")
        for name in sampled(names):
            done = run_script(RANKS, name, timeout=120)
            self.assertIn("exit [0, 0]", done.stdout, name)
            self.assertEqual(done.stdout.count("same"), 12, done.stdout)
            self.assertNotIn("PEAK", done.stdout)

    def test_gradients_in_common(self) -> None:
        self.check_programs("DDP", "DDP with views")

    def test_shards(self) -> None:
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError:
            self.skipTest("this torch has no fully_shard")
        self.check_programs("shards", "shards kept", "shards in bfloat16")

    def test_tensor_parallel(self) -> None:
        try:
            from torch.distributed.tensor.parallel import parallelize_module  # noqa: F401
        except ImportError:
            self.skipTest("this torch has no parallelize_module")
        self.check_programs("tensor parallel", "sequence parallel")

    def test_collectives(self) -> None:
        self.check_programs("collectives")


if __name__ == "__main__":
    unittest.main()
