"""Policies for operators that must not run twice, on two processes over Gloo.

Each program trains plainly, in regions, and in regions with such a policy. Gradients are equal, and
with the policy each collective runs as often as without regions.
"""

from __future__ import annotations

import unittest

import torch

from common import Case, run_script

RANKS = """
import os, sys, tempfile, torch, torch.multiprocessing as mp, torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
import remat
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

WIDTH, RANKS = 16, 2

class AllToAll(torch.autograd.Function):  # as Megatron's
    @staticmethod
    def forward(ctx, x, received, sent):
        ctx.splits = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out
    @staticmethod
    def backward(ctx, gradient):
        received, sent = ctx.splits
        out = gradient.new_empty(sum(received), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), received, sent)
        return out, None, None

class Experts(nn.Module):  # one expert on each rank, two for each token, as Mixtral
    def __init__(self, is_functional):
        super().__init__()
        self.is_functional = is_functional
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, RANKS, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 32, bias=False), nn.Linear(WIDTH, 32, bias=False)
        self.down = nn.Linear(32, WIDTH, bias=False)
    def exchange(self, x, received, sent):
        if self.is_functional:
            exchange = functional.all_to_all_single_autograd
            return exchange(x.contiguous(), received, sent, dist.group.WORLD)
        return AllToAll.apply(x, received, sent)
    def forward(self, x):
        h = self.norm(x)
        weights, chosen = torch.topk(self.router(h).softmax(-1), 1)
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=RANKS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        tokens = self.exchange(h[order], received, sent)
        done = self.down(F.silu(self.gate(tokens)) * self.up(tokens))
        back = self.exchange(F.dropout(done, 0.1), sent, received)
        return x + torch.zeros_like(x).index_add(0, order, back * weights[order])

def count(run):
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        result = run()
    calls = [each for each in profiled.key_averages() if each.key.startswith("gloo:")]
    return result, sum(each.count for each in calls)

def train_experts(wrap, is_functional):
    torch.manual_seed(1 + dist.get_rank())
    net = nn.ModuleList(Experts(is_functional) for _ in range(3))
    x = torch.randn(12, WIDTH, requires_grad=True)
    losses = []
    for _ in range(2):
        y = x
        for layer in net:
            with record_function("layer"):
                y = wrap(layer, y)
        y.square().mean().backward()
        losses.append(y.detach())
    return [*losses, x.grad, *(each.grad for each in net.parameters())]

def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, WIDTH))

class Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.like = x.detach()
        dist.send(x.contiguous(), 1)
        return x.sum() * 0
    @staticmethod
    def backward(ctx, gradient):
        out = torch.empty_like(ctx.like)
        dist.recv(out, 1)
        return out

class Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        out = torch.empty(4, WIDTH)
        dist.recv(out, 0)
        return out
    @staticmethod
    def backward(ctx, gradient):
        dist.send(gradient.contiguous(), 0)
        return None

def train_pipeline(wrap, _):
    torch.manual_seed(1)
    stage = [mlp() for _ in range(RANKS)][dist.get_rank()]
    anchor = torch.zeros(1, requires_grad=True)
    def first(x):
        return Send.apply(stage(x).sin())
    def last(anchor):
        return stage(Receive.apply(anchor)).exp().square()
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, WIDTH)
        y = wrap(first, x) if dist.get_rank() == 0 else wrap(last, anchor).sum()
        y.backward()
    return [y.detach(), *(each.grad for each in stage.parameters())]

def train_shards(wrap, _):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(1)
    net = nn.ModuleList(mlp() for _ in range(3))
    for layer in net:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    torch.manual_seed(dist.get_rank())
    def block(layer, x):
        with record_function("block"):
            return x + layer(x).sin()
    losses = []
    for _ in range(3):
        y = torch.randn(4, WIDTH)
        for layer in net:
            y = wrap(block, layer, y)
        loss = y.square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses + [each.grad.full_tensor() for each in net.parameters()]

def compare(name, train, *options):
    plain = lambda f, *args: f(*args)
    expected, num_plain = count(lambda: train(plain, *options))
    said = []
    once, matmuls = remat.save_unrepeatable(), remat.save_matmuls()
    both = remat.save_collectives() | matmuls
    policies = {"none": None, "once": once, "both": both, "matmuls": matmuls}
    if name == "pipeline":  # would wait for a second message without a policy
        policies = {"once": once, "both": both}
    for key, policy in policies.items():
        region = lambda f, *args: remat.checkpoint(f, *args, policy=policy)
        found, number = count(lambda: train(region, *options))
        same = all(map(torch.equal, found, expected))
        said.append(f"{name}/{key}: {'same' if same else 'DIFFERENT'} {number - num_plain}")
    return said

def worker(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=RANKS)
    said = compare("experts", train_experts, False) + compare("functional", train_experts, True)
    said += compare("pipeline", train_pipeline, None) + compare("shards", train_shards, None)
    os.write(1, ("\\n".join(said) + "\\n").encode())  # in one piece: both write to this pipe
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        start = lambda rank: context.Process(target=worker, args=(rank, folder + "/store"))
        processes = [start(rank) for rank in range(RANKS)]
        for each in processes: each.start()
        for each in processes: each.join()
        print("exit", [each.exitcode for each in processes])
"""


class Ranks(Case):
    def test_collectives_run_once_and_gradients_are_those_without_regions(self) -> None:
        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            self.skipTest("no Gloo")
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError:
            self.skipTest("this torch has no fully_shard")
        output = run_script(RANKS, timeout=300).stdout
        self.assertIn("exit [0, 0]", output)
        self.assertNotIn("DIFFERENT", output)
        for model in ("experts", "functional", "pipeline"):
            for policy in ("once", "both"):
                self.assertEqual(output.count(f"{model}/{policy}: same 0\n"), 2, output)
        for case in ("experts/none", "experts/matmuls", "functional/none"):
            self.assertEqual(output.count(f"{case}: same "), 2, output)
            self.assertNotIn(f"{case}: same 0\n", output)
        for case in ("none", "once", "both", "matmuls"):
            self.assertEqual(output.count(f"shards/{case}: same "), 2, output)


if __name__ == "__main__":
    unittest.main()
