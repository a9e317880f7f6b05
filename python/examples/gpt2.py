#!/usr/bin/env python3
"""Trains transformers' GPT2, made small, on real text: plain, with torch's checkpoints, and with
remat's.

Prints for each way the peak of a step's activations [bytes], the time of a step, and how far its
losses and parameters are from those of the plain training: 0. `./dev demo python` runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import remat

try:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
except ImportError as error:
    sys.exit(
        f"gpt2.py needs the package transformers ({error}). Hint: python -m pip install "
        "transformers"
    )

TEXT = Path(__file__).resolve().parents[2] / "examples" / "data" / "genesis-exodus.txt"


def batches(
    path: Path, batch_size: int, context: int, count: int
) -> tuple[list[torch.Tensor], int]:
    """Batches of ids (B, T), one id a distinct character, and how many characters there are."""
    text = path.read_bytes()
    ids_of = {character: i for i, character in enumerate(sorted(set(text)))}
    ids = torch.tensor([ids_of[character] for character in text])
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(ids) - context, (count, batch_size), generator=generator)
    return [torch.stack([ids[start : start + context] for start in row]) for row in starts], len(
        ids_of
    )


def small_gpt2(vocabulary: int, context: int, blocks: int, width: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=context, n_embd=width, n_layer=blocks, n_head=4,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(2)
    return GPT2LMHeadModel(config).train()


def stages_of(
    model: GPT2LMHeadModel, ids: Callable[[], torch.Tensor]
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The model as a chain of functions from one tensor to one tensor: ids, hidden states, ..., the
    loss."""
    body = model.transformer

    def embed(ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1])[None]
        return body.drop(body.wte(ids) + body.wpe(positions))

    def block_of(block: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            result = block(hidden)
            return result if isinstance(result, torch.Tensor) else result[0]

        return run

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(body.ln_f(hidden))
        return model.loss_function(logits, ids(), vocab_size=model.config.vocab_size)

    return [embed, *map(block_of, body.h), loss]


class Way:
    """One way to train the model, and what it took."""

    def __init__(
        self, name: str, model: GPT2LMHeadModel, loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.name = name
        self.model = model
        self.loss = loss
        self.around: Callable[[], contextlib.AbstractContextManager[object]] = (
            contextlib.nullcontext
        )
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for each in model.parameters():
            each.grad = torch.zeros_like(each)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak_bytes = 0

    def step(self, ids: torch.Tensor, meter: remat.MemoryMeter) -> None:
        torch.manual_seed(len(self.losses))  # the same dropout for all
        self.optimizer.zero_grad(set_to_none=False)
        before = meter.live_bytes
        meter.reset_peak()
        start = time.perf_counter()
        with self.around():
            loss = self.loss(ids)
            loss.backward()
        self.seconds.append(time.perf_counter() - start)
        self.peak_bytes = max(self.peak_bytes, meter.peak_bytes - before)
        self.losses.append(loss.item())
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=12, help="of each training")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument(
        "--budget-mb", type=float,
        help="of the plan; a quarter of the plain peak if it is not given"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="a file of single-byte characters")
    parser.add_argument(
        "--small", action="store_true", help="a few seconds, to see that everything works"
    )
    options = parser.parse_args()
    batch_size, context, width = (4, 64, 64) if options.small else (8, 128, 128)

    meter = remat.MemoryMeter()
    data, vocabulary = batches(options.text, batch_size, context, options.steps)
    base = small_gpt2(vocabulary, context, options.blocks, width)
    print(
        f"GPT2 of {options.blocks} blocks of width {width}, "
        f"{sum(p.numel() for p in base.parameters()):,} parameters, batches of {batch_size} x "
        f"{context} characters, torch {torch.__version__}"
    )

    def plain_loss(model: GPT2LMHeadModel) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids: model(input_ids=ids, labels=ids).loss

    def way(name: str, prepare: Callable[[GPT2LMHeadModel], object] = lambda model: None) -> Way:
        model = copy.deepcopy(base)
        prepare(model)
        return Way(name, model, plain_loss(model))

    def use_torch(model: GPT2LMHeadModel) -> None:
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})

    ways = [
        way("plain"), way("torch.utils.checkpoint", use_torch),
        way("the same, remat installed", use_torch)
    ]
    ways[2].around = remat.installed
    ways.append(way("remat.apply to the blocks", lambda model: remat.apply(model, types=GPT2Block)))
    policy = remat.save_matmuls()
    ways.append(
        way(
            "... that keep products",
            lambda model: remat.apply(model, types=GPT2Block, policy=policy),
        )
    )

    # The budget is a part of what a plain step takes.
    probe = way("")
    probe.step(data[0], meter)
    budget = round(options.budget_mb * 1e6) if options.budget_mb else probe.peak_bytes // 4

    planned = copy.deepcopy(base)
    now = data[0]
    try:
        fitted = remat.fit(stages_of(planned, lambda: now), now, budget)
    except remat.InfeasibleBudget as error:
        sys.exit(f"No plan fits into {budget:,} bytes; the least is {error.minimum_bytes:,}.")
    print(f"\nfit for {budget:,} bytes:\n{fitted}\n")
    ways.append(Way(f"plan for {budget:,}", planned, fitted))

    for ids in data:  # interleaved, so that the machine's other work meets all alike
        now = ids
        for each in ways:
            each.step(ids, meter)

    plain = ways[0]
    print(
        f"{'':28} {'peak bytes':>14} {'':>7} {'ms a step':>10} {'':>7} {'last loss':>10}  "
        "difference of losses, parameters"
    )
    plain_s = min(plain.seconds)
    is_same = True
    for each in ways:
        seconds = min(each.seconds)  # the machine's other work makes steps longer, never shorter
        of_losses = max(abs(a - b) for a, b in zip(each.losses, plain.losses))
        of_parameters = max(
            (a - b).abs().max().item()
            for a, b in zip(each.model.parameters(), plain.model.parameters())
        )
        is_same = is_same and of_losses == 0 and of_parameters == 0
        print(
            f"{each.name:28} {each.peak_bytes:>14,} {each.peak_bytes / plain.peak_bytes:>7.1%} "
            f"{seconds * 1e3:>10.1f} {seconds / plain_s:>6.2f}x {each.losses[-1]:>10.6f}  "
            f"{of_losses:g}, {of_parameters:g}"
        )
    held = ways[-1].peak_bytes <= budget
    print(f"the plan's peak {'is within' if held else 'EXCEEDS'} its budget; ", end="")
    print("all trainings are equal, bit by bit" if is_same else "THE TRAININGS DIFFER")
    sys.exit(0 if held and is_same else 1)


if __name__ == "__main__":
    main()
