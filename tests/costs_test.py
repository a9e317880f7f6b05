"""Checks that a level, a save, a region and an argument cost the same however many there are, and
what a budget without a limit adds to an operator.

Usage: costs_test.py PROGRAM. Callgrind counts instructions, which do not depend on the machine's
load. Skipped where there is no valgrind.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

MAX_GROWTH = 1.08  # of the instructions a unit, from the small size to the large one
# Instructions that a budget without a limit adds to an operator, in plain operators of forward.
MAX_BUDGET_FORWARD, MAX_BUDGET_BACKWARD = 1.2, 0.8
SKIPPED = 77


def counts(folder):
    """Instructions of each run, in order; what follows the last one is left out."""
    dumps = {}
    for path in pathlib.Path(folder).glob("counted.*"):
        text = path.read_text(errors="replace")
        part = re.search(r"^part: (\d+)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if part and total:
            dumps[int(part.group(1))] = int(total.group(1))
    return [dumps[part] for part in sorted(dumps)]


def budget_faults(runs, count):
    """Says whether a budget costs too much. `runs`: plain and within a budget, forward and then the
    whole step, each after a small run."""
    plain, budget, plain_step, budget_step = (run / count for run in runs[1::2])
    forward = (budget - plain) / plain
    backward = (budget_step - budget - plain_step + plain) / plain
    failed = forward > MAX_BUDGET_FORWARD or backward > MAX_BUDGET_BACKWARD
    limits = f": at most {MAX_BUDGET_FORWARD} and {MAX_BUDGET_BACKWARD}" if failed else ""
    print(f"an operator takes {plain:.0f} instructions; a budget without a limit adds "
          f"{forward:.2f} of that in forward and {backward:.2f} in backward{limits}")
    return failed


def main(program):
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        print("skipped: there is no valgrind")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [valgrind, "--tool=callgrind", f"--callgrind-out-file={folder}/counted",
             "--dump-after=end_of_run", program],
            capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout, done.stderr)
            return 1
        found = counts(folder)
    *shapes, (_, count) = [line.split("\t") for line in done.stdout.splitlines()]
    num_grown = 3 * len(shapes)
    if len(found) < num_grown + 8:
        print(
            f"{len(found)} counts of {len(shapes)} shapes: valgrind wrote down fewer than it "
            "should")
        return 1
    failed = int(budget_faults(found[num_grown:num_grown + 8], int(count)))
    for index, (unit, num_small, num_large) in enumerate(shapes):
        _, small, large = found[3 * index:3 * index + 3]
        each_small, each_large = small / int(num_small), large / int(num_large)
        growth = each_large / each_small
        failed += growth > MAX_GROWTH
        print(f"instructions a {unit}: {each_small:.0f} of {num_small}, "
              f"{each_large:.0f} of {num_large}"
              f"{'' if growth <= MAX_GROWTH else f': grows by {growth:.2f}, at most {MAX_GROWTH}'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
