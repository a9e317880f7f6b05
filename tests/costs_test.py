"""Checks that a level, a save, a region and an argument cost the same however many there are.

Usage: costs_test.py PROGRAM. Callgrind counts instructions, which do not depend on the machine's load. Skipped where
there is no valgrind.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

MAX_GROWTH = 1.08  # of the instructions a unit, from the small size to the large one
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
    shapes = [line.split("\t") for line in done.stdout.splitlines()]
    if len(found) < 3 * len(shapes):
        print(f"{len(found)} counts of {len(shapes)} shapes: valgrind wrote down fewer than it should")
        return 1
    failed = 0
    for index, (unit, num_small, num_large) in enumerate(shapes):
        _, small, large = found[3 * index:3 * index + 3]
        each_small, each_large = small / int(num_small), large / int(num_large)
        growth = each_large / each_small
        failed += growth > MAX_GROWTH
        print(f"instructions a {unit}: {each_small:.0f} of {num_small}, {each_large:.0f} of {num_large}"
              f"{'' if growth <= MAX_GROWTH else f': grows by {growth:.2f}, at most {MAX_GROWTH}'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
