#!/usr/bin/env python3
"""Checks ARCHITECTURE.md against the tree: what it names exists.

    folders    each folder of lib has its line, in the order and with the doors of arrows_test.py
    walk       a numbered list comes to each room (a header with its source) once at the most
    tables     each path of "The Rules" and "Where the answer stands" exists, and the names beside
    it stand in that file
    glossary   each word occurs in the code

Broken copies of the page must be found, each for what is broken in it.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import arrows_test  # noqa: E402

ROOT = arrows_test.ROOT
PAGE = ROOT / "ARCHITECTURE.md"
CODED = re.compile(r"`([^`]+)`")
PATH = re.compile(
    r"(?:include|hooks|lib|tests|examples|bench|tools|docs)/[\w./*-]+\.(?:h|cpp|py|md|build)"
    r"|lib/\w+")
TABLES = ("The Rules", "Where the answer stands")
MIN_QUESTIONS, NUM_RULES = 20, 16


def section(page, title):
    """The text below a heading, or nothing."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return found[1] if found else ""


def rows(text):
    """The cells of each row of the tables in a text, without their heads."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rule = next((i for i, line in enumerate(lines) if re.fullmatch(r"[|: -]+", line)), -1)
    return cells[rule + 1:]


def files_of(path):
    return sorted(ROOT.glob(path))


def folder_faults(page):
    listed = rows(section(page, "Folders"))
    names = [CODED.findall(cells[0])[0].removeprefix("lib/") for cells in listed]
    if names != arrows_test.FOLDERS:
        yield f"the folders of lib are {', '.join(arrows_test.FOLDERS)}, and not {', '.join(names)}"
    for name, cells in zip(names, listed):
        if not (ROOT / "lib" / name).is_dir():
            yield f"there is no folder lib/{name}"
        doors = arrows_test.DOORS.get(name)
        wanted = "every header" if doors is None else ", ".join(f"`{door}`"
                                                                for door in sorted(doors)) or "none"
        if cells[2] != wanted:
            yield f"the doors of lib/{name} are {wanted}"
        for door in sorted(doors or ()):
            if not (ROOT / f"lib/{name}/{door}.h").is_file():
                yield f"lib/{name} has no door {door}.h"


def lists(text):
    """The numbered lists of a text, each as the text of its items."""
    found, last = [], 0
    for number, item in re.findall(r"^(\d+)\. (.*(?:\n {2,}.*)*)", text, re.M):
        if int(number) != last + 1:
            found.append([])
        elif not found:
            found.append([])
        if int(number) == 1 and found[-1]:
            found.append([])
        found[-1].append(item)
        last = int(number)
    return found


def walk_faults(page):
    walks = lists(section(page, "The way of one saved tensor"))
    if len(walks) != 2:
        yield f"the way of a tensor has {len(walks)} lists, and not one forward and one backward"
    for walk in walks:
        seen = set()
        for item in walk:
            paths = [name for name in CODED.findall(item) if PATH.fullmatch(name)]
            if len(paths) != 1:
                yield f"a step names {len(paths)} files: {item}"
            for path in paths:
                room = path.rsplit(".", 1)[0]
                if room in seen:
                    yield f"the way comes to {room} a second time"
                seen.add(room)
            yield from named_faults(item)


def named_faults(text):
    """Paths that do not exist, and names that do not stand in the file before them."""
    files, path = [], None
    for name in CODED.findall(text):
        if PATH.fullmatch(name):
            path, files = name, files_of(name)
            if not files:
                yield f"there is no {name}"
            continue
        if not files or not all(file.is_file() for file in files):
            continue
        code = "".join(file.read_text(encoding="utf-8") for file in files)
        for part in re.findall(r"\w+", name):
            if not re.search(rf"\b{part}\b", code):
                yield f"{path} does not have {name}"
                break
    for title in re.findall(r"`([^`]+)` Note \[([^\]]+)\]", text):
        if not any(f"Note [{title[1]}]" in file.read_text(encoding="utf-8")
                   for file in files_of(title[0])):
            yield f"{title[0]} does not have Note [{title[1]}]"


def table_faults(page):
    rules, questions = (rows(section(page, title)) for title in TABLES)
    if [cells[0] for cells in rules] != [str(number) for number in range(1, NUM_RULES + 1)]:
        yield f"the table of Rules does not go from 1 to {NUM_RULES}"
    if len(questions) < MIN_QUESTIONS:
        yield f"the table of questions has {len(questions)} rows"
    for cells in rules + questions:
        located = [cells[2], cells[3]] if len(cells) == 4 else [cells[-1]]
        for cell in located:
            if not any(PATH.fullmatch(name) for name in CODED.findall(cell)):
                yield f"a row names no file: {cells[0]}"
            yield from named_faults(cell)


def add_faults(page):
    """Where to add things: the files exist, and each identifier stands somewhere in the code."""
    text = section(page, "Where to add")
    for name in CODED.findall(text):
        if PATH.fullmatch(name) and not files_of(name):
            yield f"there is no {name}"
        elif re.fullmatch(r"[A-Za-z_:()]+", name) and name not in arrows_test.TREES:
            for part in re.findall(r"\w+", name):
                if not re.search(rf"\b{part}\b", code()):
                    yield f"nothing is called {name}"


def code(cache=[]):  # read once
    """All of lib, hooks and include, and arrows_test.py, which has the words of the order of
    folders."""
    if not cache:
        files = [file for tree in ("include", "hooks", "lib")
                 for file in sorted((ROOT / tree).rglob("*.*")) if file.suffix in (".h", ".cpp")]
        cache.append("\n".join(file.read_text(encoding="utf-8")
                               for file in files + [ROOT / "tests/arrows_test.py"]))
    return cache[0]


def occurs(word):
    """True if the word stands in the code: as words, or joined as names are, and in the plural
    too."""
    joined = r"[\s_]*(?://+)?\s*".join(map(re.escape, word.split()))
    return re.search(rf"(?<![a-z]){joined}(?:s|es|ed|ing|ped|ping)?(?![a-z])", code(),
                     re.I) is not None or \
        re.search("".join(part.capitalize() for part in word.split()), code()) is not None


def glossary_faults(page):
    seen = set()
    for cells in rows(section(page, "Glossary")):
        for word in re.split(r",\s*", cells[0]):
            if word in seen:
                yield f"the glossary has {word} twice"
            seen.add(word)
            if not occurs(word):
                yield f"no code has the word {word}"
    if len(seen) < 40:
        yield f"the glossary has {len(seen)} words"


def faults_of(page):
    for check in (folder_faults, walk_faults, table_faults, add_faults, glossary_faults):
        yield from check(page)


# Faults that must be found: the text, its replacement, and words of the report.
BROKEN = (
    ("`lib/frame/stop_rule.cpp` `wants_stop`", "`lib/frame/filler.cpp` `wants_a_stop`",
     "does not have wants_a_stop"),
    ("`lib/rng/draws.cpp` `draw`", "`lib/rng/dice.cpp` `draw`", "there is no lib/rng/dice.cpp"),
    ("`lib/rng/draws.h` Note [Draws]", "`lib/rng/draws.h` Note [Dice]",
     "does not have Note [Dice]"),
    ("| `lib/rng` |", "| `lib/dice` |", "the folders of lib are"),
    ("`device_claims`, ", "", "the doors of lib/rng are"),
    ("3. `lib/frame/task.cpp`", "3. `lib/frame/frame_reads.h`", "a second time"),
    ("| slot |", "| pigeonhole |", "no code has the word pigeonhole"),
    ("`is_planted`", "`is_seeded_fault`", "nothing is called is_seeded_fault"),
    ("| 7 | One recompute", "| 17 | One recompute", "the table of Rules"),
)


def main():
    page = PAGE.read_text(encoding="utf-8")
    faults = list(faults_of(page))
    for there, instead, words in BROKEN:
        if there not in page:
            faults.append(f"the page does not have `{there}` to break")
        elif not any(words in fault for fault in faults_of(page.replace(there, instead, 1))):
            faults.append(f"a page that is broken in `{there}` is not found")
    print("\n".join(faults) if faults else "ARCHITECTURE.md agrees with the tree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
