#!/usr/bin/env python3
"""Wraps prose at 100 columns: paragraphs of C++ comments and of Markdown that have a longer line.

Usage: wrap_prose.py [--check] FILE...

`Throws`, `Memory:` and the like begin a paragraph. One is left alone where it may be a table, a
drawing or code: a line that begins with more than one space, or has two spaces inside. Names of
Notes, links and short pieces of code are not broken, and no line begins with the name of a Note.
Comments behind code, tables and code blocks of Markdown keep their lines. With --check nothing is
written, and the exit status is 1 if a paragraph would change.
"""

import re
import sys
from pathlib import Path

COLUMNS = 100
GLUE = "\x00"  # stands for a space at which no line ends
COMMENT = re.compile(r"^(\s*)(///?)( ?)(.*)$")
LABEL = re.compile(
    r"(Throws|Returns|Costs) "
    r"|(Memory|Threads|Source|Example|Lifetime|Recommended|Arguments|Cost|Time): ")
ITEM = re.compile(r"^(\* |- |\d+\. )(.*)$")
UNBROKEN = re.compile(r"\S* ?Note \[[^\]]*\]|!?\[[^\]\n]*\]\([^)\n]*\)|`[^`\n]{1,60}`")


def lines_of(text, first, rest):
    """Returns the text in lines of at most COLUMNS, the first with one prefix and the others with
    another."""
    words = UNBROKEN.sub(lambda found: found.group().replace(" ", GLUE), text).split(" ")
    lines, line = [], first
    for word in filter(None, words):
        begins = line in (first, rest) and line == (rest if lines else first)
        if not begins and len(line) + 1 + len(word) > COLUMNS:
            lines.append(line)
            line, begins = rest, True
        line += word if begins else " " + word
    return [each.replace(GLUE, " ").rstrip() for each in lines + [line]]


def is_prose(bodies):
    return not any(body.startswith(" ") or re.search(r"\S  +\S", body) or body.endswith("\\")
                   for body in bodies)


def wrapped(paragraph, prefix, hanging):
    """Returns a paragraph of bodies without their prefix in lines, or as it is."""
    as_it_is = [(prefix + body).rstrip() for body in paragraph]
    if all(len(line) <= COLUMNS for line in as_it_is):
        return as_it_is
    item = ITEM.match(paragraph[0])
    bodies = paragraph
    if item is not None:
        bodies = [item.group(2)] + [body[hanging:] if body.startswith(" " * hanging) else body
                                    for body in paragraph[1:]]
    if not is_prose(bodies):
        return as_it_is
    first = prefix + (item.group(1) if item is not None else "")
    rest = prefix + (" " * hanging if item is not None else "")
    return lines_of(" ".join(map(str.strip, bodies)), first, rest)


def paragraphs(bodies):
    """Splits consecutive lines where an empty one, an item or the name of a Note begins another."""
    found = []
    for body in bodies:
        begins = (
            not found
            or not body.strip()
            or not found[-1][-1].strip()
            or ITEM.match(body) is not None
            or LABEL.match(body) is not None
            or body.startswith("Note [")
            or found[-1][-1].startswith("Note [")
            or (body.startswith(" ") and ITEM.match(found[-1][0]) is None)
            or (not body.startswith(" ") and found[-1][-1].startswith(" ")
                and ITEM.match(found[-1][0]) is None)
        )
        if begins:
            found.append([])
        found[-1].append(body)
    return found


def hanging_of(paragraph):
    item = ITEM.match(paragraph[0])
    return 0 if item is None else len(item.group(1))


def source(text):
    result, block, prefix = [], [], None

    def flush():
        for paragraph in paragraphs(block):
            result.extend(wrapped(paragraph, prefix, hanging_of(paragraph)))
        block.clear()

    is_off = False
    for line in text.split("\n"):
        is_off = (is_off or "clang-format off" in line) and "clang-format on" not in line
        comment = COMMENT.match(line)
        if comment is None or is_off or comment.group(4).startswith("<"):
            flush()
            prefix = None
            result.append(line)
            continue
        here = comment.group(1) + comment.group(2) + " "
        if here != prefix:
            flush()
            prefix = here
        block.append(comment.group(4))
    flush()
    return "\n".join(result)


def markdown(text):
    result, block = [], []

    def flush():
        for paragraph in paragraphs(block):
            indent = len(paragraph[0]) - len(paragraph[0].lstrip())
            inner = [body[indent:] if body[:indent].strip() == "" else body for body in paragraph]
            result.extend(wrapped(inner, " " * indent, hanging_of(inner)))
        block.clear()

    is_code = False
    for line in text.split("\n"):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if is_fence or is_code or line.startswith(("|", "#", "    ", "<", "!")) or not line.strip():
            flush()
            result.append(line)
        else:
            block.append(line)
    flush()
    return "\n".join(result)


def main():
    names = sys.argv[1:]
    only_checks = "--check" in names
    is_right = True
    for name in names:
        if name == "--check":
            continue
        file = Path(name)
        text = file.read_text(encoding="utf-8")
        new = markdown(text) if file.suffix == ".md" else source(text)
        if new == text:
            continue
        is_right = False
        if only_checks:
            print(f"{name}: prose over {COLUMNS} columns")
        else:
            file.write_text(new, encoding="utf-8")
    return 1 if only_checks and not is_right else 0


if __name__ == "__main__":
    sys.exit(main())
