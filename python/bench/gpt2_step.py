#!/usr/bin/env python3
"""The costs of a step of a small GPT2 of transformers: plain, and with torch's checkpoints without
and with remat.

    python/bench/gpt2_step.py [--samples N] [--sample-ms MS] [--clock wall|thread] [--smoke]

Forward and backward, every block a region, interleaved in one process; gradients are compared
first. At batch 1 x 16 the host's work on operators and regions is nearly all there is, at 4 x 64
arithmetic counts, too. Needs the package transformers; bench/METHOD.md says what the numbers leave
out.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch

import remat
from measure import Side, parse, print_line, rounds, say

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt2 import small_gpt2  # noqa: E402
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel  # noqa: E402
from transformers.utils import logging  # noqa: E402

BLOCKS, WIDTH, VOCABULARY = 12, 64, 64
# Batches, and what of upstream's step is wanted.
BATCHES = {(1, 16): 0.70, (4, 64): 0.90}


def sides_of(ids: torch.Tensor) -> list[Side]:
    plain = small_gpt2(VOCABULARY, 64, BLOCKS, WIDTH)
    upstream, own = copy.deepcopy(plain), copy.deepcopy(plain)
    enable = getattr(
        upstream, "activation_checkpointing_enable", upstream.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})
    remat.apply(own, types=GPT2Block)

    def step(model: GPT2LMHeadModel) -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    def of(model: GPT2LMHeadModel) -> list[torch.Tensor]:
        torch.manual_seed(1)
        step(model)
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # steps add to it in place
        return found

    expected = of(plain)
    before = remat.counters()["frames_created"]
    found = [of(upstream), of(own)]
    with remat.installed():
        found.append(of(upstream))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, expected)), (
        "a gradient is not the plain one"
    )
    assert remat.counters()["frames_created"] - before == 2 * BLOCKS
    return [
        Side("plain", lambda: step(plain)),
        Side("upstream", lambda: step(upstream)),
        Side("drop-in", lambda: step(upstream), remat.installed),
        Side("own", lambda: step(own)),
    ]


def main() -> None:
    options = parse(__doc__ or "")
    logging.set_verbosity_error()    # its notes would stand in the table
    say(f"GPT2 of {BLOCKS} blocks of width {WIDTH}, {VOCABULARY} ids")
    say(
        f"{'a step [ms]':24} {'plain':>8} {'upstream':>9} {'drop-in':>8} {'/ upstream':>11} "
        f"{'wanted':>7} {'own':>8} {'/ upstream':>11}"
    )
    for (batch, context), wanted in BATCHES.items():
        sides = sides_of(
            torch.randint(VOCABULARY, (batch, context), generator=torch.Generator().manual_seed(1))
        )
        if options.smoke:
            say(f"{batch} x {context}: gradients are the plain ones")
            continue
        taken = rounds(sides, options)
        for side, all_ns in taken.items():
            print_line(
                "python_gpt2_step", {"batch": f"{batch} x {context}", "side": side}, options,
                min(all_ns), all_ns
            )
        ms = {side: min(all_ns) / 1e6 for side, all_ns in taken.items()}
        say(
            f"{f'{batch} x {context}':24} {ms['plain']:8.2f} {ms['upstream']:9.2f} "
            f"{ms['drop-in']:8.2f} {ms['drop-in'] / ms['upstream']:11.3f} {wanted:7.2f} "
            f"{ms['own']:8.2f} {ms['own'] / ms['upstream']:11.3f}"
        )


if __name__ == "__main__":
    main()
