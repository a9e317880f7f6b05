#!/usr/bin/env python3
"""Checks the Markdown files against the tree: code is compiled, output is printed, files exist, texts are thrown.

A block marked cpp stands, but for its indentation, in a source that the build compiles; each line of a meson or cmake
block in a file of tests/install; the text block after "The whole program prints" is examples/quickstart.expected.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TREES = "include|lib|hooks|tests|examples|bench|tools|subprojects|packaging"


def compiled():
    """The sources that a program of the build is made of, and the headers that only those include."""
    folders = ("examples", "tests", "tests/rules", "tests/python")
    yield from (file for folder in folders for file in sorted((ROOT / folder).glob("*.cpp")))
    yield from sorted((ROOT / "examples").rglob("*.h"))


def stands_in(block, text):
    """Whether the block's lines follow each other in the text, all indented by the same more or less."""
    wanted, lines = block.rstrip("\n").split("\n"), text.split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in wanted if line.strip()), default=0)
    wanted = [line[margin:] for line in wanted]
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start].lstrip() != wanted[0].lstrip():
            continue
        indent = lines[start][:len(lines[start]) - len(wanted[0])]
        if [(indent + line).rstrip() for line in wanted] == lines[start:start + len(wanted)]:
            return True
    return False


def block_faults(text):
    sources = [file.read_text(encoding="utf-8") for file in compiled()]
    installing = [file.read_text(encoding="utf-8") for file in (ROOT / "tests/install").rglob("*") if file.is_file()]
    for language, block in BLOCK.findall(text):
        first = block.strip().split("\n")[0].strip()
        if language == "cpp" and not any(stands_in(block, source) for source in sources):
            yield f"the block that begins with `{first}` stands in no source that is compiled"
        if language in ("meson", "cmake"):
            for line in filter(None, map(str.strip, block.split("\n"))):
                if not any(line in map(str.strip, file.split("\n")) for file in installing):
                    yield f"`{line}` stands in no file of tests/install"


def path_faults(text):
    """Links, and names in backticks that begin with a folder of the tree; * stands for anything."""
    prose = BLOCK.sub("", text)
    named = set(re.findall(r"\]\(([^)#:]+)\)", prose))
    named |= set(re.findall(rf"`((?:{TREES})/[\w./*-]+)`", prose))
    for name in sorted(named - {"tests/NAME.cpp", "include/remat/NAME.h", "tests/rules/rule_NN_*.cpp"}):
        if not any(ROOT.glob(name)) and name not in ("subprojects/remat", "tests/compile_fail/*.cpp"):
            yield f"there is no {name}"


def joined(text):
    """A C++ source with its adjacent string literals made one."""
    return re.sub(r'"\s*\n\s*"', "", text)


def note_faults(text):
    sources = [file.read_text(encoding="utf-8") for tree in ("include", "lib", "hooks")
               for file in (ROOT / tree).rglob("*.*")]
    for title in sorted(set(re.findall(r"Note \[([^\]]+)\]", text)) - {"Title"}):
        if not any(f"Note [{title}]" in source for source in sources):
            yield f"there is no Note [{title}]"


def readme_faults(text):
    """What README.md must have: the output, every option with its default, every kind of error with its text."""
    expected = (ROOT / "examples/quickstart.expected").read_text(encoding="utf-8")
    if f"The whole program prints\n\n```text\n{expected}```\n" not in text:
        yield "the output after `The whole program prints` is not examples/quickstart.expected"

    options = (ROOT / "include/remat/options.h").read_text(encoding="utf-8").split("struct CheckpointOptions", 1)[1]
    for name, default in re.findall(r"^  [\w:<>&() ]+ (\w+)(?:\{\}| = ([\w:]+));", options, re.M):
        row = next((line for line in text.split("\n") if re.match(rf"\| `.*\b{name}\b", line)), None)
        if row is None or (default or "empty").split("::")[-1] not in row:
            yield f"the table of options does not show {name} with its default"

    kinds = (ROOT / "include/remat/error.h").read_text(encoding="utf-8")
    for kind in re.findall(r"^    (\w+),? +///<", kinds, re.M):
        if f"`{kind}`" not in text:
            yield f"the errors do not show {kind}"
    thrown = "".join(joined(file.read_text(encoding="utf-8")) for tree in ("lib", "hooks")
                     for file in sorted((ROOT / tree).glob("*.cpp")))
    for row in re.findall(r"^\|(?: `\w+`)? \| (\"[^|]+) \|", text, re.M):
        for sentence in re.findall(r'"([^"]+)"', row):
            if sentence not in thrown:
                yield f"no error says \"{sentence}\""


def main():
    faults = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        checks = [block_faults, path_faults, note_faults] + ([readme_faults] if name == "README.md" else [])
        faults += [f"{name}: {fault}" for check in checks for fault in check(text)]
    print("\n".join(faults) if faults else "the documents agree with the tree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
