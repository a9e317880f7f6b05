#!/usr/bin/env python3
"""Checks that each layer of the library links with the layers below it alone.

Usage: layers_test.py BUILD

Reads the symbols of the library's objects in BUILD: no object of a layer may need a symbol that
only a higher layer defines. The layers and their order stand in lib/meson.build.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NM = shutil.which("gcc-nm") or "nm"  # gcc-nm reads objects of link-time optimization, too


def layers():
    """The names of the layers, lowest first."""
    text = (ROOT / "lib/meson.build").read_text(encoding="utf-8")
    return re.findall(r"^  \['(\w+)', \[", text, re.M)


def layer_of(unit):
    return "core" if unit == "base" else unit.removeprefix("faults_")


def symbols(objects):
    """The symbols that these objects define, and those that they need from elsewhere."""
    defined, needed = set(), set()
    for line in subprocess.run([NM, *map(str, objects)], capture_output=True, text=True,
                               check=True).stdout.split("\n"):
        found = re.search(r"\b([A-Za-z]) (\S+)$", line)
        if found:
            (needed if found[1] in "Uwv" else defined).add(found[2])
    return defined, needed - defined


def faults(found):
    """The upward needs of layers: (layer, higher layer, symbols)."""
    names = list(found)
    for i, name in enumerate(names):
        _, needed = found[name]
        below = set().union(*(found[other][0] for other in names[: i + 1]))
        for higher in names[i + 1:]:
            upward = (needed - below) & found[higher][0]
            if upward:
                yield name, higher, sorted(upward)


def main():
    objects = {name: [] for name in layers()}
    for path in sorted(Path(sys.argv[1]).glob("lib/libremat.so*.p/*.o")):
        unit = re.search(r"\.\._(\w+)\.cpp\.o$", path.name)
        if not unit or layer_of(unit[1]) not in objects:
            sys.exit(f"{path.name} belongs to no layer: {', '.join(objects)}")
        objects[layer_of(unit[1])].append(path)
    missing = [name for name, paths in objects.items() if not paths]
    if missing:
        sys.exit(f"no objects of {', '.join(missing)} in {sys.argv[1]}")
    found = {name: symbols(paths) for name, paths in objects.items()}
    wrong = list(faults(found))
    for name, higher, upward in wrong:
        print(f"{name} needs {higher}: {' '.join(upward)}")
    # The test must be able to fail: with the order reversed there are upward needs.
    if not list(faults(dict(reversed(found.items())))):
        sys.exit("no layer needs any other, so this test sees nothing")
    print(f"{len(found)} layers, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
