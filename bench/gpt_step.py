#!/usr/bin/env python3
"""The Python peer of bench/gpt_step.cpp, which starts it: the same GPT with torch.utils.checkpoint.

Arguments: DEVICE DTYPE VOCABULARY BLOCKS WIDTH HEADS CONTEXT BATCH. It reads one question a line
and answers with one:
    version                 -> torch's version and the folder of its libraries
    parameters              -> how many numbers the model has
    sample WAY REPEATS      -> the nanoseconds that so many steps took together, and until they were
    queued on the device
    peak WAY                -> [bytes] of a step at its peak beyond what is there before, on an
    accelerator; -1 on the CPU
WAY: plain, blocks, matmuls.
"""

import functools
import gc
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # not needed here
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts)

MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
           torch.ops.aten.baddbmm.default}
MATMULS |= {getattr(torch.ops.aten, name).default for name in dir(torch.ops.aten)
            if name.startswith("_scaled_dot_product") and not name.endswith("backward")}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(),
                                 nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads,
                                                                  width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary, blocks, width, heads, context):
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def loss(self, ids, targets, way):
        x = self.characters(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            if way == "plain":
                x = block(x)
            else:
                context_fn = {} if way == "blocks" else {"context_fn": keep_matmuls}
                x = checkpoint(block, x, use_reentrant=False, **context_fn)
        scores = F.linear(self.norm(x), self.characters.weight)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def policy(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


keep_matmuls = functools.partial(create_selective_checkpoint_contexts, policy)


class Peer:
    def __init__(self, device, dtype, vocabulary, blocks, width, heads, context, batch):
        self.device, self.is_narrow = torch.device(device), dtype == "bfloat16"
        self.model = Gpt(*map(int, (vocabulary, blocks, width, heads, context))).to(self.device)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.randint(int(vocabulary), (int(batch), int(context) + 1), device=self.device)
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:]

    def step(self, way):
        self.model.zero_grad(set_to_none=False)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_narrow):
            loss = self.model.loss(self.ids, self.targets, way)
        loss.backward()

    def wait(self):
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def sample(self, way, repeats):
        self.step(way)
        gc.collect()
        gc.disable()  # as timeit does
        self.wait()
        begin = time.perf_counter_ns()
        for _ in range(int(repeats)):
            self.step(way)
        queued = time.perf_counter_ns() - begin
        self.wait()
        taken = time.perf_counter_ns() - begin
        gc.enable()
        return f"{taken} {queued}"

    def peak(self, way):
        if self.device.type == "cpu":
            return "-1"
        torch.accelerator.reset_peak_memory_stats(self.device)
        before = torch.accelerator.memory_stats(self.device)["requested_bytes.all.current"]
        self.step(way)
        return str(torch.accelerator.memory_stats(self.device)["requested_bytes.all.peak"] - before)

    def answer(self, question, *words):
        if question == "version":
            libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
            return f"{torch.__version__} {os.path.realpath(libraries)}"
        if question == "parameters":
            return str(sum(parameter.numel() for parameter in self.model.parameters()))
        return {"sample": self.sample, "peak": self.peak}[question](*words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    peer = Peer(*sys.argv[1:])
    for asked in sys.stdin:
        print(peer.answer(*asked.split()), flush=True)
