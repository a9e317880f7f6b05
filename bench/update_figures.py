#!/usr/bin/env python3
"""Puts the table of a benchmark's run into METHOD.md, with the machine it ran on.

    ./dev bench region_cost 2>table.txt >samples.jsonl
    python3 bench/update_figures.py samples.jsonl table.txt
"""
import json
import pathlib
import re
import sys

METHOD = pathlib.Path(__file__).resolve().parent / "METHOD.md"
FIRST_ROW = re.compile(r"^(sin in grad mode|overhead per |step of |a plain neg |frontier of )")


def processor():
    found = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else "an unnamed processor"


def main():
    samples, table = (pathlib.Path(name).read_text().splitlines() for name in sys.argv[1:3])
    first = json.loads(samples[0])
    begin = next(number for number, line in enumerate(table) if FIRST_ROW.match(line))
    rows = [line.rstrip() for line in table[begin:] if line.strip()]
    facts = (f"{processor()}; LibTorch {first['torch']}; {first['compiler']}; {first['threads']} thread; "
             f"clock: {first['params']['clock']}; {first['samples']} samples; commit {first['commit']}.")
    block = "\n".join([f"<!-- {first['bench']} -->", facts, "```", *rows, "```", "<!-- end -->"])
    pattern = re.compile(rf"<!-- {first['bench']} -->\n.*?<!-- end -->", re.S)
    text, replaced = pattern.subn(lambda _: block, METHOD.read_text())
    if replaced != 1:
        sys.exit(f"{METHOD.name} has {replaced} places for {first['bench']}")
    METHOD.write_text(text)


if __name__ == "__main__":
    main()
