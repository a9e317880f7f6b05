#!/usr/bin/env python3
"""Compares the exported symbols of the library with the recorded list, tests/abi.txt.

Usage: abi_test.py LIBRARY TORCH_VERSION [--renew]

A compiled binding calls the library through these symbols. A change of the list therefore needs
another `binding_abi` (include/remat/binding.h). --renew writes the list, and refuses to if the
number is the recorded one. The symbols are compared by their names in C++; all are of namespace
remat. Another minor version of LibTorch gives types other names: then there is nothing to compare,
and the test ends with 77.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests/abi.txt"
HEADER = ROOT / "include/remat/binding.h"
SKIPPED = 77
OWN = re.compile(r"(((guard variable|typeinfo|typeinfo name|vtable|VTT) for|[\w-]+ thunk to) )?"
                 r"remat::")


def exported(library):
    """The defined dynamic symbols, by their names in C++, sorted."""
    command = ["nm", "-D", "--defined-only", library]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    mangled = "\n".join(line.split()[-1] for line in listed.stdout.splitlines())
    names = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True, check=True)
    return sorted(set(names.stdout.splitlines()))


def foreign(library):
    """The exported symbols that are not of namespace remat."""
    return [name for name in exported(library) if not OWN.match(name)]


def minor_of(version):
    return version.rsplit(".", 1)[0]


def main(arguments):
    renew = "--renew" in arguments
    paths = [each for each in arguments if each != "--renew"]
    if len(paths) != 2:
        sys.exit(__doc__)
    library, torch = paths
    number = re.search(r"int binding_abi = (\d+);", HEADER.read_text(encoding="utf-8"))[1]
    record = RECORD.read_text(encoding="utf-8") if RECORD.exists() else "binding_abi 0, LibTorch "
    head, *recorded = record.splitlines()
    old_number, old_torch = re.fullmatch(r"binding_abi (\d+), LibTorch ([\d.]*)", head).groups()
    if old_torch and not renew and minor_of(torch) != old_torch:
        print(f"tests/abi.txt is of LibTorch {old_torch}, the library of {torch}.")
        return SKIPPED
    if others := foreign(library):
        print("Exported, and not of namespace remat (lib/exports.map):", *others, sep="\n")
        return 1
    found = exported(library)
    gone, new = sorted(set(recorded) - set(found)), sorted(set(found) - set(recorded))
    command = f"tests/abi_test.py {library} {torch} --renew"
    if renew:
        if (gone or new) and number == old_number:
            sys.exit(f"The list changed, and binding_abi is {number} as before: raise it in "
                     f"{HEADER.relative_to(ROOT)} first.")
        lines = [f"binding_abi {number}, LibTorch {minor_of(torch)}", *found]
        RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0
    for sign, names in (("-", gone), ("+", new)):
        for name in names:
            print(sign, name)
    if (gone or new) and number == old_number:
        print(f"{len(gone)} symbols are gone, {len(new)} are new, and binding_abi is still "
              f"{number}.\nHint: set it to {int(number) + 1} in {HEADER.relative_to(ROOT)}, "
              f"then type {command}")
    elif gone or new or number != old_number:
        print(f"binding_abi is {number}, and tests/abi.txt is of {old_number}. Hint: {command}")
    return 1 if gone or new or number != old_number else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
