#!/usr/bin/env python3
"""One block, plain and as a region: what is alive after forward, and the same gradients."""

import torch

import remat

torch.manual_seed(0)
meter = remat.MemoryMeter()
block = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.Tanh()
)
x = torch.randn(256, 64)


def gradients(name, forward):
    before = meter.live_bytes
    loss = forward(x).square().mean()
    print(f"{name:14}{meter.live_bytes - before} bytes alive after forward")
    return torch.autograd.grad(loss, block.parameters())


plain = gradients("plain:", block)
checkpointed = gradients("checkpointed:", lambda x: remat.checkpoint(block, x))
equal = all(torch.equal(a, b) for a, b in zip(plain, checkpointed))
print(f"gradients bit-equal: {'yes' if equal else 'NO'}")
