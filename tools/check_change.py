#!/usr/bin/env python3
"""Checks the lines and files that a change adds: check_change.py [FILE...]

Prints each new line over 100 columns, each that ends with a space, and each file over 500 KB.
Tables of Markdown, addresses and recorded outputs may be longer. The change is the index beside the
last commit or, where pre-commit compares two commits, the later one beside the earlier one.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, BYTES = 100, 500_000
RECORDED = (".expected", ".svg", ".ppm", ".txt", ".jsonl")


def added(files):
    """The path, the number and the text of each line that the change adds."""
    earlier = os.environ.get("PRE_COMMIT_FROM_REF")
    change = [f"{earlier}...{os.environ['PRE_COMMIT_TO_REF']}"] if earlier else ["--cached"]
    command = ["git", "-C", ROOT, "diff", "--unified=0", "--no-color", *change, "--", *files]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    diff = output.decode(errors="replace")
    path, number = "", 0
    for line in diff.split("\n"):
        if line.startswith("+++ "):
            path = line[6:]
        elif found := re.match(r"@@ -\S+ \+(\d+)", line):
            number = int(found[1])
        elif line.startswith("+"):
            yield path, number, line[1:]
            number += 1


def faults(files):
    for path, number, line in added(files):
        is_table = path.endswith(".md") and line.startswith("|")
        is_recorded = path.endswith(RECORDED)
        if len(line) > COLUMNS and not (is_table or is_recorded or "://" in line):
            yield f"{path}:{number}: {len(line)} columns"
        if line != line.rstrip() and not is_recorded:
            yield f"{path}:{number}: a space at the end"
    for name in files:
        if (ROOT / name).is_file() and (size := (ROOT / name).stat().st_size) > BYTES:
            yield f"{name}: {size} bytes"


def main():
    found = list(faults(sys.argv[1:]))
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
