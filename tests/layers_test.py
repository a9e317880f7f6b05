#!/usr/bin/env python3
"""Links each layer of the library with the layers below it alone: none may need a higher one.

Usage: layers_test.py BUILD COMPILER [LINK_ARGUMENT...]

The objects are those of the library in BUILD. The layers and their order stand in lib/meson.build.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def layers():
    """The names of the layers, lowest first."""
    text = (ROOT / "lib/meson.build").read_text(encoding="utf-8")
    return re.findall(r"^  \['(\w+)', \[", text, re.M)


def objects_by_layer(build):
    """The objects of the library, which are named after units, by layer."""
    names = layers()
    found = {name: [] for name in names}
    for path in sorted(build.glob("lib/libremat.so*.p/*.o")):
        unit = re.search(r"\.\._(?:faults_)?(\w+)\.cpp\.o$", path.name)
        layer = "core" if unit and unit[1] == "base" else unit and unit[1]
        if layer not in found:
            sys.exit(f"{path.name} belongs to no layer: {', '.join(names)}")
        found[layer].append(path)
    return found


def link(compiler, objects, arguments, to):
    """The linker's complaint, or an empty string."""
    command = [*compiler, "-shared", "-O0", "-flto=auto", "-flto-partition=none", "-Wl,--no-undefined", "-o", str(to),
               *map(str, objects), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def undefined(complaint):
    return sorted(set(re.findall(r"undefined reference to `([^']+)'", complaint)))


def main():
    build, compiler, arguments = Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3:]
    by_layer = objects_by_layer(build)
    below, faults = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for name, objects in by_layer.items():
            if not objects:
                faults += 1
                print(f"the layer {name} has no object in {build}")
            below += objects
            complaint = link(compiler, below, arguments, Path(folder) / "layers.so")
            if complaint:
                faults += 1
                print(f"{name} does not link with the layers below it: {undefined(complaint) or complaint}")
            else:
                print(f"{name} links")
        # The test must be able to fail: every layer but the lowest needs one below it.
        if not link(compiler, by_layer["selective"], arguments, Path(folder) / "alone.so"):
            faults += 1
            print("selective links without the core, so this test sees nothing")
    print(f"{len(by_layer)} layers, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
