#!/usr/bin/env python3
"""Costs of a byte budget beside its peers: torch's checkpoints, and the compiler's memory budget.

    python/bench/budget_peers.py [--samples N] [--sample-ms MS] [--clock wall|thread] [--smoke]
        [--compile] [--blocks N] [--dropout P]

Forward and backward of one GPT, interleaved in one process: plain, torch's checkpoint around every
block, and remat.budget at 80, 50, 30 and 15 % of the plain peak. With --compile also torch.compile
under several `activation_memory_budget`, each of which takes minutes to compile. Beside each peer
stands remat.budget with the peer's measured peak. Peaks are exact bytes of torch's allocator
beyond what is alive before the step.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import types
from collections.abc import Iterator
from typing import Callable, Optional

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from measure import Side, parse, print_line, rounds, say

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 128, 4, 64, 128, 8
SHARES = (0.8, 0.5, 0.3, 0.15)
COMPILED_BUDGETS = (1.0, 0.5, 0.25, 0.1)


class Block(nn.Module):
    """A pre-norm block. (B, T, WIDTH) -> (B, T, WIDTH)"""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, w)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Gpt(nn.Module):
    def __init__(self, blocks: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.checkpoints = False

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@contextlib.contextmanager
def within(bytes: int) -> Iterator[None]:
    with remat.budget(bytes):
        yield


class Program:
    """The model, its batch, and the ways to run its step."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(1)
        blocks, batch = (2, 2) if options.smoke else (options.blocks, BATCH)
        self.model = Gpt(blocks, options.dropout)
        ids = torch.randint(VOCABULARY, (batch, LENGTH + 1))
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.meter = remat.MemoryMeter()
        for each in self.model.parameters():
            each.grad = torch.zeros_like(each)

    def step(
        self, call: Optional[Callable[..., torch.Tensor]] = None, checkpoints: bool = False
    ) -> None:
        torch.manual_seed(2)
        self.model.checkpoints = checkpoints
        for each in self.model.parameters():
            if each.grad is not None:
                each.grad.zero_()
        (self.model if call is None else call)(self.ids, self.targets).backward()

    def peak_of(self, side: Side) -> int:
        """[bytes] beyond what is alive before the step, of its second run."""
        with side.around():
            side.work()
            before = self.meter.live_bytes
            self.meter.reset_peak()
            side.work()
            return self.meter.peak_bytes - before

    def gradients(self, side: Side) -> list[torch.Tensor]:
        with side.around():
            side.work()
        return [each.grad.clone() for each in self.model.parameters() if each.grad is not None]

    def compiled(self, budget: float) -> Side:
        import torch._functorch.config as functorch

        model = self.model

        def plain(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return model(ids, targets)

        # The compiler knows code by its object: each budget needs code of its own.
        code = plain.__code__.replace(co_name=f"within_{budget}")
        call = torch.compile(types.FunctionType(code, globals(), closure=plain.__closure__))
        start = time.perf_counter()
        with functorch.patch(activation_memory_budget=budget):
            self.step(call)
        say(f"compiled with {budget} in {time.perf_counter() - start:.0f} s")
        return Side(f"compiled, {budget}", lambda: self.step(call))


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--compile", action="store_true", help="also torch.compile: minutes")
        parser.add_argument("--blocks", type=int, default=12)
        parser.add_argument("--dropout", type=float, default=0.1)

    options = parse(__doc__ or "", more)
    program = Program(options)
    plain = Side("plain", program.step)
    expected = program.gradients(plain)
    plain_peak = program.peak_of(plain)
    sides, peaks = [plain], {"plain": plain_peak}

    def add(side: Side, is_exact: bool = True) -> None:
        found = program.gradients(side)
        is_equal = all(torch.equal(a, b) for a, b in zip(expected, found))
        assert is_equal or not is_exact, f"{side.name}: a gradient is not the plain one"
        if not is_exact:
            worst = max(float((a - b).abs().max()) for a, b in zip(expected, found))
            say(f"{side.name}: gradients differ by {worst:.1e} at most")
        sides.append(side)
        peaks[side.name] = program.peak_of(side)

    def add_budget(name: str, bytes: int) -> None:
        add(Side(name, program.step, lambda: within(bytes)))

    for share in SHARES:
        add_budget(f"budget, {share:.0%}", int(share * plain_peak))
    add(Side("checkpoint, every block", lambda: program.step(checkpoints=True)))
    add_budget("budget, that peak", peaks["checkpoint, every block"])
    for budget in COMPILED_BUDGETS if options.compile else ():
        side = program.compiled(budget)
        add(side, is_exact=False)
        if peaks[side.name] < plain_peak:
            add_budget(f"budget, peak of {budget}", peaks[side.name])
    if options.smoke:
        return say("gradients are the plain ones")
    taken = rounds(sides, options)
    least = {side: min(all_ns) for side, all_ns in taken.items()}
    say(
        f"{'GPT, ' + str(options.blocks) + ' blocks':28} {'peak bytes':>12} {'%':>6} "
        f"{'min [ms]':>9} {'of plain':>9}"
    )
    for side, all_ns in taken.items():
        params = {
            "side": side, "peak_bytes": peaks[side], "blocks": options.blocks,
            "dropout": options.dropout
        }
        print_line("python_budget_peers", params, options, least[side], all_ns)
        say(
            f"{side:28} {peaks[side]:12} {100 * peaks[side] / plain_peak:6.1f} "
            f"{least[side] / 1e6:9.1f} {least[side] / least['plain']:9.3f}"
        )


if __name__ == "__main__":
    sys.exit(main())
