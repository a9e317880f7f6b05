#!/usr/bin/env python3
"""Tests of tools/find_torch.py, by folders that look like LibTorch to it."""

import os
import pathlib
import subprocess
import sys
import tempfile

FIND = pathlib.Path(__file__).resolve().parent.parent / "tools/find_torch.py"


def make(root, numbers, libraries=()):
    header = root / "include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("".join(f"#define TORCH_VERSION_{name} {number}\n"
                              for name, number in zip(("MAJOR", "MINOR", "PATCH"), numbers)))
    (root / "lib").mkdir()
    for name in ("torch", "c10", *libraries):
        (root / f"lib/lib{name}.so").touch()
    return root


def find(*arguments, **variables):
    """(exit status, lines of stdout, stderr), with nothing of this machine's own environment but
    what programs need."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_ROOT"}
    ran = subprocess.run([sys.executable, FIND, *map(str, arguments)], capture_output=True,
                         text=True,
                         env={**environment,
                              **{name: str(value) for name, value in variables.items()}})
    return ran.returncode, ran.stdout.splitlines(), ran.stderr


def cases(folder):
    near = make(folder / "near", (2, 13, 0), ["torch_cpu"])
    cuda = make(folder / "cuda", (2, 11, 0), ["torch_cpu", "torch_cuda"])
    hip = make(folder / "hip", (2, 12, 1), ["torch_hip"])
    old = make(folder / "old", (2, 5, 1), ["torch_cuda"])

    status, lines, _ = find(TORCH_ROOT=near)
    yield "takes TORCH_ROOT", (status, lines[:4]) == (
        0, [str(near), str(near / "lib"), "2.13.0", "TORCH_ROOT"])
    status, lines, _ = find(cuda, TORCH_ROOT=near)
    yield "a given root comes before TORCH_ROOT", (status, lines[0]) == (0, str(cuda))

    for name in ("cuda", "cuda:1"):
        status, lines, _ = find("--device", name, TORCH_ROOT=cuda)
        yield f"takes one with CUDA for {name}", (status, lines[:1],
                                                  lines[2:3]) == (0, [str(cuda)], ["2.11.0"])
    status, lines, _ = find("--device", "cuda", TORCH_ROOT=hip)
    yield "ROCm's is called cuda, too", (status, lines[:1]) == (0, [str(hip)])

    status, lines, errors = find("--device", "cuda", TORCH_ROOT=near)
    yield "one that was asked for and has no CUDA is refused", (status, lines) == (1, [])
    yield "which says so", f"TORCH_ROOT: {near} is LibTorch 2.13.0 without cuda" in errors
    hint = "Hint: set TORCH_ROOT (or -Dtorch_root) to the folder of a LibTorch for cuda"
    yield "and what to set", hint in errors
    status, _, errors = find("--device", "xpu", TORCH_ROOT=cuda)
    says = "2.11.0 without xpu" in errors and "LibTorch for xpu" in errors
    yield "CUDA is not XPU", status == 1 and says

    status, _, errors = find(TORCH_ROOT=old)
    says = "is LibTorch 2.5.1; remat needs 2.6 or newer" in errors
    yield "one that is too old is refused", status == 1 and says
    status, _, errors = find(TORCH_ROOT=folder / "nowhere")
    says = "holds no LibTorch (looked for include/torch and" in errors
    yield "so is a folder without one", status == 1 and says


def main():
    with tempfile.TemporaryDirectory() as folder:
        faults = [what for what, holds in cases(pathlib.Path(folder)) if not holds]
    for fault in faults:
        print("not so:", fault)
    return len(faults) > 0


if __name__ == "__main__":
    sys.exit(main())
