#!/usr/bin/env python3
"""Checks tests/coverage.txt: every id of the conformance catalogue has a test, or a reason and the issue that brings one.

Usage: coverage_test.py            check, exit 1 with one line per fault
       coverage_test.py --update   first fill lines that say "?", or name no test, from the ids that tests name
"""

import re
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
COVERAGE = TESTS / "coverage.txt"
ID = r"[A-Z]{2,4}-\d{2}"
REASON = re.compile(r"reason: .+ \((?:issue [4-8]|device)\)")
ALIAS = re.compile(rf"= ({ID})")  # the catalogue says: the same as
PYTHON_CASE = re.compile(r"^@case\w*.*\n(?:@.*\n)*def (\w+)\(", re.M)
STRING = r'"(?:[^"\\]|\\.)*"'
CASE = re.compile(
    rf"\b(?:TEST_CASE|TEMPLATE_TEST_CASE)\(\s*((?:{STRING}\s*)+)(?:,\s*((?:{STRING}\s*)+))?")


def text_of(literals):
    """The value of adjacent C++ string literals (the tests use only \\" and \\\\ as escapes)."""
    return "".join(re.sub(r"\\(.)", r"\1", part[1:-1]) for part in re.findall(STRING, literals))


def cases():
    """[(name, ids in its tags, ids in the comment above it or in its body, file)] of all test cases."""
    found = []
    for source in sorted(TESTS.rglob("*.cpp")):
        text = source.read_text(encoding="utf-8")
        matches = list(CASE.finditer(text))
        starts = []
        for match in matches:  # a comment directly above a case belongs to it
            start = match.start()
            while True:
                line_start = text.rfind("\n", 0, max(start - 1, 0)) + 1
                if start == 0 or not text[line_start:start].lstrip().startswith("//"):
                    break
                start = line_start
            starts.append(start)
        for i, match in enumerate(matches):
            end = starts[i + 1] if i + 1 < len(matches) else len(text)
            tags = set(re.findall(rf"\[({ID})\]", text_of(match.group(2) or "")))
            ids = set(re.findall(rf"\b{ID}\b", text[starts[i]:end]))
            found.append((text_of(match.group(1)), tags, ids - tags, source.relative_to(TESTS)))
    for source in sorted((TESTS / "python").glob("*.py")):
        for name in PYTHON_CASE.findall(source.read_text(encoding="utf-8")):
            found.append((name.replace("_", " "), set(), set(), source.relative_to(TESTS)))
    return found


def rows():
    """(stated total, [(line number, id, target)], [faults])."""
    total, entries, faults = None, [], []
    for number, line in enumerate(COVERAGE.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if match := re.fullmatch(r"ids: (\d+)", line):
            total = int(match.group(1))
        elif match := re.fullmatch(rf"({ID}) \| (.+)", line):
            entries.append((number, match.group(1), match.group(2)))
        else:
            faults.append(f"line {number}: not `ID | test name` or `ID | reason: ... (issue N)`")
    return total, entries, faults


def check():
    total, entries, faults = rows()
    if total is None:
        faults.append("no line `ids: N` with the number of ids")
    if len(entries) != total:
        faults.append(f"{len(entries)} ids listed, {total} expected")
    names, seen, tagged = {}, set(), {}
    for name, tags, _, source in cases():
        if name in names:
            faults.append(f"two test cases are called \"{name}\": {names[name]}, {source}")
        names[name] = source
        for identity in tags:
            tagged.setdefault(identity, name)
    targets = {identity: target for _, identity, target in entries}
    for number, identity, target in entries:
        if identity in seen:
            faults.append(f"line {number}: {identity} is listed twice")
        seen.add(identity)
        if target.startswith("reason:"):
            if not REASON.fullmatch(target):
                faults.append(f"line {number}: {identity}: a reason ends in (issue 4..8) or (device)")
            elif identity in tagged:
                faults.append(f"line {number}: {identity} has a test now: \"{tagged[identity]}\"")
        elif alias := ALIAS.fullmatch(target):
            if targets.get(alias.group(1), "= ").startswith("= "):
                faults.append(f"line {number}: {identity}: {alias.group(1)} is no entry of its own")
        elif target not in names:
            faults.append(f"line {number}: {identity}: no test case is called \"{target}\"")
    for name, tags, ids, source in cases():
        for identity in sorted((tags | ids) - seen):
            faults.append(f"{source}: \"{name}\" names {identity}, which is not in coverage.txt")
    return faults


def update():
    found = cases()
    names = {case[0] for case in found}
    by_id = {}
    for kind in (1, 2):  # tags say more than comments
        for case in found:
            for identity in case[kind]:
                by_id.setdefault(identity, case[0])
    lines = []
    for line in COVERAGE.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(rf"({ID}) \| (.+)", line.strip())
        stale = match and match.group(2) not in names and not match.group(2).startswith(("reason:", "= "))
        if stale and match.group(1) in by_id:
            line = f"{match.group(1)} | {by_id[match.group(1)]}"
        lines.append(line)
    COVERAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    elif sys.argv[1:]:
        sys.exit(__doc__)
    problems = check()
    print("\n".join(problems) if problems else "coverage.txt: every id has a test or a reason")
    sys.exit(1 if problems else 0)
