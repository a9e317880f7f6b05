#!/usr/bin/env python3
"""Checks the folder tree's arrows of knowledge by the includes, the citations of Notes, and the names and sizes of files.

    examples, bench, tests -> include <- hooks <- lib

Faults fail the test; sizes above the aims are printed as warnings.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("include", "hooks", "lib", "tests", "examples", "bench")

# What files of a tree may include of the project.
MAY_INCLUDE = {
    "include": {"include"},
    "hooks": {"include", "hooks"},
    "lib": {"include", "hooks", "lib"},
    "tests": {"include", "tests"},
    "examples": {"include", "examples"},
    "bench": {"include", "bench", "examples"},
}
# What public headers may include of LibTorch: nothing heavier than ATen/core/Tensor.h.
LIGHT = re.compile(r"(ATen/core/(Tensor|TensorBase|Generator|List|Dict|ivalue|operator_name|function_schema)\.h|c10/.+\.h)")
WITH_MODULES = {"sequential.h", "module.h"}
AVOIDED = {"utils", "util", "helpers", "helper", "misc", "manager", "common"}
AIMS = {".h": 250, ".cpp": 400}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
NOTE = re.compile(r"Note \[([^\]]+)\]")
NOTE_HEAD = re.compile(r"^\s*(?:///?|\*)\s*Note \[([^\]]+)\]", re.M)


def tree_of(path):
    parts = path.resolve().relative_to(ROOT).parts
    return parts[0] if parts[0] in TREES else None


def target_of(source, bracket, name):
    """The file of the project that an include names, or None."""
    folders = [ROOT, ROOT / "include"]
    if bracket == '"':
        folders.insert(0, source.parent)
    for folder in folders:
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(ROOT) and tree_of(candidate):
            return candidate
    return None


def include_faults(source, text):
    tree = tree_of(source)
    for bracket, name in INCLUDE.findall(text):
        target = target_of(source, bracket, name)
        if target is not None:
            if tree_of(target) not in MAY_INCLUDE[tree]:
                yield f"{tree} must not know {tree_of(target)}: includes {name}"
            continue
        if bracket == '"':
            yield f'"{name}" is no file of the project'
        if name.startswith("catch2/") and "support" not in source.parts:
            yield "only tests/support includes Catch2"
        if name.startswith("fmt/") and source.suffix == ".h" and tree == "include":
            yield "fmt is private: not in a public header"
        if tree == "include" and "/" in name and not LIGHT.fullmatch(name):
            if not (source.name in WITH_MODULES and name.startswith("torch/nn")):
                yield f"too heavy for a public header: {name}"
        if tree in ("hooks", "lib") and name == "torch/torch.h":
            yield "torch/torch.h is too heavy for the library"
        if name == "Python.h" and tree != "tests":
            yield "the library must not need Python"


def note_faults(texts):
    """Each Note that is cited or written exists exactly once."""
    written, cited = {}, {}
    for source, text in texts.items():
        heads = NOTE_HEAD.findall(text)
        for title in heads:
            written.setdefault(title, []).append(source)
        for title in NOTE.findall(text):
            cited.setdefault(title, set()).add(source)
    for title, sources in sorted(cited.items()):
        places = written.get(title, [])
        if len(places) != 1:
            where = ", ".join(str(s.relative_to(ROOT)) for s in (places or sorted(sources)))
            yield f"Note [{title}] is written {len(places)} times: {where}"


def main():
    faults, warnings, texts = [], [], {}
    for tree in TREES:
        for source in sorted((ROOT / tree).rglob("*")):
            if source.suffix not in (".h", ".cpp"):
                continue
            text = source.read_text(encoding="utf-8")
            texts[source] = text
            where = source.relative_to(ROOT)
            faults += [f"{where}: {fault}" for fault in include_faults(source, text)]
            if AVOIDED & set(re.split(r"[_/.]", str(where))):
                faults.append(f"{where}: the name says nothing (utils, helpers, misc, manager, common)")
            # The body of a header may open with that header, whose sentence it shares.
            opens_with_header = source.suffix == ".cpp" and f'/{source.stem}.h"' in text.split("\n")[0]
            if not opens_with_header and not any(line.startswith("//") for line in text.split("\n")[:3]):
                faults.append(f"{where}: does not open with a sentence that says what it is")
            lines = text.count("\n")
            if tree != "tests" and lines > AIMS[source.suffix]:
                warnings.append(f"{where}: {lines} lines, the aim is {AIMS[source.suffix]}")
    faults += note_faults(texts)
    for warning in warnings:
        print("warning:", warning)
    for fault in faults:
        print(fault)
    if not texts:
        faults.append("no sources found")
    print(f"{len(texts)} files, {len(faults)} faults, {len(warnings)} warnings")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
