#!/usr/bin/env python3
"""An attention with a gradient rule of its own, beside the generic recompute: bytes and times.

The forward is torch's fused kernel, which never holds the probabilities and returns the log-sum-exp
of the scores. Backward rebuilds the probabilities from it. A region around the plain attention
recomputes scores and softmax instead."""

import math
import statistics
import sys
import time

import torch

import remat


def scores(q, k):
    return (q / math.sqrt(q.shape[-1])) @ k.mT


def attention(q, k, v):
    return scores(q, k).softmax(-1) @ v


def forward(q, k, v):
    """Returns the result, and what `rematerialize` needs."""
    if torch.is_grad_enabled():  # for a second derivative: the kernel has none of its sums
        return attention(q, k, v), (scores(q, k).logsumexp(-1, keepdim=True),)
    result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return result, (sums.unsqueeze(-1),)


def rematerialize(small, inputs):
    q, k, v = inputs
    return q, k, v, scores(q, k).sub_(small[0]).exp_()


def backward(saved, gradients):
    q, k, v, p = saved
    (g,) = gradients
    scale = 1 / math.sqrt(q.shape[-1])
    ds = torch._softmax_backward_data(g @ v.mT, p, -1, p.dtype)
    return ds @ (k * scale), ds.mT @ (q * scale), p.mT @ g


with_rule = remat.custom_function(forward, rematerialize, backward)
WAYS = {"plain": attention, "region": lambda *t: remat.checkpoint(attention, *t), "rule": with_rule}


def inputs(*shape, dtype=torch.float32):
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3)]


def second_derivatives(function, given):
    first = torch.autograd.grad(function(*given).sin().sum(), given, create_graph=True)
    return torch.autograd.grad((first[0] * first[1] * first[2]).sum(), given)


def main():
    torch.manual_seed(0)
    given = inputs(1, 8, 1024, 64)
    meter = remat.MemoryMeter()
    found, facts = {}, {name: [] for name in WAYS}
    for _ in range(5):
        for name, way in WAYS.items():
            meter.reset_peak()
            before, begin = meter.live_bytes, time.perf_counter()
            y = way(*given)
            held, peak = meter.live_bytes - before, meter.peak_bytes - before
            found[name] = torch.autograd.grad(y.sin().sum(), given)
            facts[name].append((held / 1e6, peak / 1e6, 1e3 * (time.perf_counter() - begin)))
            del y
    print(f"{'':8}{'held [MB]':>14}{'forward [MB]':>16}{'[ms]':>10}")
    for name, rounds in facts.items():
        held, peak, took = map(statistics.median, zip(*rounds))
        print(f"{name:8}{held:14.2f}{peak:16.2f}{took:10.1f}")
    small = inputs(1, 2, 160, 64, dtype=torch.float64)
    pairs = [*zip(found["rule"], found["plain"])]
    pairs += zip(second_derivatives(with_rule, small), second_derivatives(attention, small))
    is_right = all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in pairs)
    print(f"first and second derivatives agree: {'yes' if is_right else 'NO'}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
