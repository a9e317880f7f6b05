"""Runs torch's checkpoint() under remat.installed(), and compares gradients bit by bit."""

import torch
from torch.utils.checkpoint import checkpoint

import remat

torch.manual_seed(0)
layers = (torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4))
model = torch.nn.ModuleList(layers)
x = torch.randn(8, 16)


def gradients(call):
    y = x
    for block in model:
        y = call(block, y)
    return torch.autograd.grad(y.sum(), list(model.parameters()))


plain = gradients(lambda block, y: block(y))
with remat.installed():
    before = remat.counters()["recomputes"]
    regions = gradients(lambda block, y: checkpoint(block, y, use_reentrant=False))
    assert remat.counters()["recomputes"] - before == 4, "the drop-in did not run"
assert all(map(torch.equal, plain, regions)), "gradients differ"
