#!/usr/bin/env python3
"""Runs the examples on the stand-in for a device: they must work, print no warning, and train as
their plain runs do, bit by bit (kernels of a real device may add in another order, so that the
examples themselves do not insist).

    examples_on_device_test.py LIBRARY_OF_THE_STAND_IN FOLDER_FOR_OUTPUT PROGRAM...
"""

import os
import pathlib
import subprocess
import sys

# Small ones, by the name of the program.
ARGUMENTS = {
    "budget": [["--small", "--blocks", "8"], ["--small", "--blocks", "8", "--budget", "free"]],
    "char_transformer": [["--small"]],
    "data_parallel": [[]],
    "moe_routing": [[]],
    "quickstart": [[]],
    "save_compressed": [[]],
    "sharded": [[]],
    "unet": [["--small", "--norm", "batch"], ["--small", "--norm", "instance"]],
}
# The line that an example prints of a training that differs, before it goes on.
DIFFERS = ("not those of the plain run", "not bit-equal", "DIFFER", "FAILED", ": NO",
           "bit-equal: no")
# The line for a training that does not differ, beside the device's name.
AGREES = {"data_parallel": "(furthest: 0)", "quickstart": "gradients bit-equal: yes",
          "sharded": "(furthest: 0)"}


def faults_of(library, command):
    ran = subprocess.run(command, capture_output=True, text=True,
                         env={**os.environ, "LD_PRELOAD": library, "OMP_WAIT_POLICY": "passive"})
    faults = [f"it printed '{words}'" for words in DIFFERS if words in ran.stdout]
    if ran.returncode != 0:
        faults.append(f"its exit status was {ran.returncode}")
    name = pathlib.Path(command[0]).name
    if "far" not in ran.stdout and name != "quickstart":
        faults.append("it does not name the device")
    if AGREES.get(name, "") not in ran.stdout:
        faults.append(f"it did not print '{AGREES[name]}'")
    if ran.stderr:
        faults.append("it wrote to stderr")
    if faults:
        print(" ".join(command), ran.stdout, ran.stderr, *faults, sep="\n")
    return len(faults)


def main():
    library, out, *programs = sys.argv[1:]
    faults = 0
    for program in programs:
        name = pathlib.Path(program).name
        for arguments in ARGUMENTS[name]:
            for dtype in ("float32", "bfloat16"):
                folder = ["--out", out] if name in ("budget", "char_transformer", "unet") else []
                faults += faults_of(
                    library, [program, *arguments, *folder, "--device", "far", "--dtype", dtype])
    return faults > 0


if __name__ == "__main__":
    sys.exit(main())
