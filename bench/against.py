#!/usr/bin/env python3
"""Compares the benchmarks of two builds: against.py OLD NEW [--limit PERCENT] [--rounds N] NAME...

OLD and NEW are folders of programs. The programs run in turns, N times each, on the clock of their
own thread. Each figure of time is the least of a side's rounds. Prints a table of all figures, and
ends with 1 if a time grew by more than the limit, or a number of bytes grew. Run by
`./dev bench --against REF`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

BYTES = ("peak_bytes", "held_bytes")
# The programs measure other libraries, too, and those are the same on both sides.
ARGUMENTS = {"region_cost": ["--no-peer"]}


def lines_of(program, samples):
    """Each line that a program prints: its name and parameters, and its measurements."""
    command = [program, "--clock", "thread", "--samples", str(samples)]
    command += ARGUMENTS.get(program.name, [])
    run = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if run.returncode:
        sys.exit(f"{run.stderr}{program} ended with {run.returncode}")
    for line in run.stdout.splitlines():
        measured = json.loads(line)
        yield f"{measured['bench']} {json.dumps(measured['params'])}", measured


def least(found, kept):
    """The smaller of two measurements in each figure."""
    return {name: min(found[name], kept.get(name, found[name])) for name in ("min_ns", *BYTES)
            if name in found}


def measure(folders, name, rounds, samples):
    """For each side the least figures of a program's lines."""
    sides = [{} for _ in folders]
    for _ in range(rounds):
        for folder, side in zip(folders, sides):
            for key, measured in lines_of(folder / name, samples):
                side[key] = least(measured, side.get(key, {}))
    return sides


def grown(old, new, limit):
    """The figures of a line that are too large."""
    for name, value in new.items():
        allowed = old.get(name, value) * (1 + limit / 100 if name == "min_ns" else 1)
        if value > allowed:
            yield name


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--limit", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    compared, worse = 0, []
    for name in options.names:
        old, new = measure(options.folders, name, options.rounds, options.samples)
        for key in new:
            if key not in old:
                continue
            compared += 1
            ratio = new[key]["min_ns"] / old[key]["min_ns"] if "min_ns" in new[key] else 1
            faults = list(grown(old[key], new[key], options.limit))
            worse += [f"{key}: {each} {old[key][each]:.0f} -> {new[key][each]:.0f}"
                      for each in faults]
            print(f"{ratio:7.3f}  {'LARGER ' if faults else ''}{key}", flush=True)
    print(f"{compared} lines compared, {len(worse)} figures too large", *worse, sep="\n")
    return bool(worse) or not compared


if __name__ == "__main__":
    sys.exit(main())
