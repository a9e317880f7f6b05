#!/usr/bin/env python3
"""Runs what other users of torch.utils.checkpoint have, plainly, with upstream's code and with
remat, and compares.

    python/tests/others.py [--fairscale FOLDER] [--monai]

--fairscale: FOLDER is a source tree of fairscale with its `tests/`. Those of its checkpoint wrapper
    run with the wrapper put on `torch.utils.checkpoint` (use_reentrant=False) without and with
    remat, and on `remat.checkpoint`. A test that ends otherwise with remat installed than without
    is named, and makes the exit status 1.
--monai: networks of the installed package monai that have a switch for checkpoints: two steps with
    it off and on, the latter with upstream's code and with remat. Losses and gradients must be
    equal, bit by bit.

Nothing of theirs is part of this tree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

from upstream import count, ends_of

# The program of the child: fairscale's wrapper on another checkpoint, then pytest.
RUN = """
import json, sys
way, arguments = json.loads(sys.argv[1])
import torch
import torch.utils.checkpoint as upstream
import fairscale.nn.checkpoint.checkpoint_activations as wrapper
import remat

def forward(original, weak_module, offload_to_cpu, *args, **kwargs):
    module = weak_module()
    if not torch.is_grad_enabled() or wrapper.thread_local.is_checkpointing_disabled:
        return original(module, *args, **kwargs)
    if way == "own":
        return remat.checkpoint(original, module, *args, modules=[module],
                                offload_inputs=offload_to_cpu, **kwargs)
    return upstream.checkpoint(original, module, *args, use_reentrant=False, **kwargs)

wrapper._checkpointed_forward = forward
if way == "drop-in":
    remat.install()
import pytest
status = pytest.main(arguments)
print("REMAT", json.dumps(remat.counters()))
"""
FAIRSCALE_TESTS = ("test_checkpoint_activations.py", "test_checkpoint_activations_norm.py")


def run_fairscale(folder: Path, way: str) -> tuple[dict[str, str], int, str]:
    """Returns ({test: its end}, regions opened, the output's end)."""
    with tempfile.TemporaryDirectory() as reports:
        report = Path(reports) / "report.xml"
        arguments = [str(folder / "tests" / "nn" / "checkpoint" / name) for name in FAIRSCALE_TESTS]
        arguments += [
            "-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore",
            "--tb=line"
        ]
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN,
             json.dumps([way, [*arguments, f"--junitxml={report}"]])],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path[1:]])},
            text=True, timeout=900,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        regions = [
            json.loads(line[6:])["frames_created"]
            for line in child.stdout.splitlines()
            if line.startswith("REMAT ")
        ]
        return ends_of(report), regions[0] if regions else -1, child.stdout[-3000:]


def compare_fairscale(folder: Path) -> int:
    """Prints the columns, and returns the number of tests that the drop-in ends otherwise."""
    print(f"{'fairscale: pass/fail/skip':34} regions opened")
    found = {}
    for way in ("upstream", "drop-in", "own"):
        found[way], regions, output = run_fairscale(folder, way)
        print(f"{way:12} {count(found[way]):21} {regions}", flush=True)
        if not found[way]:
            print(output)
            return 1
    different = 0
    for test, end in found["upstream"].items():
        for way in ("drop-in", "own"):
            if found[way].get(test) != end:
                print(f"  {end} -> {found[way].get(test, 'missing')} ({way}): {test}")
                different += way == "drop-in"
    return different


Make = Callable[[bool], Any]


def monai_networks() -> Iterator[tuple[str, Make, tuple[int, ...]]]:
    """Returns (name, the maker of the network with its switch, the input's shape)."""
    from monai.networks.blocks.activation_checkpointing import ActivationCheckpointWrapper
    from monai.networks.nets import VQVAE, AutoencoderKL, SwinUNETR, UNet

    yield "SwinUNETR", lambda on: SwinUNETR(
        in_channels=1, out_channels=2, feature_size=12, spatial_dims=2, drop_rate=0.1,
        attn_drop_rate=0.1,
        use_checkpoint=on,
    ), (1, 1, 64, 64)  # fmt: skip
    yield "AutoencoderKL", lambda on: AutoencoderKL(
        spatial_dims=2, in_channels=1, out_channels=1, num_res_blocks=(1, 1), channels=(8, 8),
        attention_levels=(False, True), latent_channels=4, norm_num_groups=4, use_checkpoint=on,
    ), (1, 1, 32, 32)  # fmt: skip
    yield "VQVAE", lambda on: VQVAE(
        spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 8), num_res_channels=(8, 8),
        num_res_layers=1,
        downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        num_embeddings=16,
        embedding_dim=8, use_checkpointing=on,
    ), (1, 1, 32, 32)  # fmt: skip

    def unet(on: bool) -> Any:
        class Switched(UNet):
            """Every subblock of a UNet in monai's own wrapper: its `_get_connection_block` is there
            to be overridden."""

            def _get_connection_block(self, down_path: Any, up_path: Any, subblock: Any) -> Any:
                inside = ActivationCheckpointWrapper(subblock) if on else subblock
                return super()._get_connection_block(down_path, up_path, inside)

        return Switched(
            spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2),
            num_res_units=1, dropout=0.1
        )

    yield "UNet", unet, (1, 1, 32, 32)


def train(make: Make, shape: tuple[int, ...], on: bool) -> list[Any]:
    """Returns losses and gradients of two steps."""
    import torch

    def tensors(result: Any) -> Iterator[torch.Tensor]:
        if isinstance(result, torch.Tensor):
            yield result
        elif isinstance(result, (tuple, list)):
            for each in result:
                yield from tensors(each)

    torch.manual_seed(1)
    network = make(on).train()
    torch.manual_seed(2)
    found: list[Any] = []
    for _ in range(2):
        network.zero_grad()
        loss = sum(
            each.square().mean()
            for each in tensors(network(torch.randn(shape)))
            if each.is_floating_point()
        )
        loss.backward()  # type: ignore[union-attr]
        found += [
            loss.detach(),  # type: ignore[union-attr]
            *(p.grad.clone() for p in network.parameters() if p.grad is not None),
        ]
        with torch.no_grad():
            for p in network.parameters():
                if p.grad is not None:
                    p -= 0.01 * p.grad
    return found


def compare_monai() -> int:
    """Prints a row for each network, and returns the number of those whose trainings differ."""
    import torch

    import remat

    torch.set_num_threads(1)
    print(f"{'monai':16} {'tensors':>8} {'upstream':>10} {'drop-in':>10} {'regions':>8}")
    different = 0
    for name, make, shape in monai_networks():
        plain, upstream = train(make, shape, False), train(make, shape, True)
        before = remat.counters()["frames_created"]
        with remat.installed():
            ours = train(make, shape, True)
        regions = remat.counters()["frames_created"] - before

        def said(found: list[Any], plain: list[Any] = plain) -> str:
            same = len(found) == len(plain) and all(map(torch.equal, found, plain))
            return "equal" if same else "DIFFERENT"

        print(
            f"{name:16} {len(plain):8} {said(upstream):>10} {said(ours):>10} {regions:8}",
            flush=True,
        )
        different += said(ours) != "equal" or regions == 0
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--fairscale", type=Path, help="a source tree of fairscale")
    parser.add_argument("--monai", action="store_true", help="the installed package")
    options = parser.parse_args()
    if not options.fairscale and not options.monai:
        parser.error("nothing was asked for")
    different = compare_fairscale(options.fairscale.resolve()) if options.fairscale else 0
    different += compare_monai() if options.monai else 0
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
