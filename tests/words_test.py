#!/usr/bin/env python3
"""Counts what makes comments and documents hard to read, and fails where a count has grown.

Usage: words_test.py [--list NAME]     prints the places of one count

Each count has a limit, which falls: where a count is below its limit, write the new number here.
"""

import io
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 100
FOLDERS = ("bench", "docs", "examples", "hooks", "include", "lib", "packaging", "python", "tests",
           "tools")
MAX_WORDS = 35

LIMITS = {
    "lines over 100 columns": 1,
    "doc comments of headers that begin with a fragment": 0,
    "doc comments of the library that begin with a fragment": 0,
    "comments and docstrings of Python that begin with a fragment": 0,
    "sentences over 35 words": 0,
    "what it, what is": 3,
}

SOURCES = [file for folder in ("include", "lib", "hooks")
           for file in sorted((ROOT / folder).rglob("*")) if file.suffix in (".h", ".cpp")]
HEADERS = [file for file in SOURCES if "include" in file.relative_to(ROOT).parts]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md",
         *sorted((ROOT / "docs").glob("*.md"))]
FRAGMENT = re.compile(
    r"^(What|Who|Whose|Whom|Whether|Which|Of|The same|It|So|Null|With|Where|As|To)\b")
PYTHON_FRAGMENT = re.compile(r"(What|Who|Whose|Whom|Whether|Which|Nobody|Of|By|That|Null)\b")
FREE_RELATIVE = re.compile(r"\bwhat (it|is)\b", re.I)


def place(file, number):
    return f"{file.relative_to(ROOT)}:{number}"


def is_prose(line):
    return not line.lstrip().startswith(("|", "    ", "!", "#", "```"))


def prose_lines(page):
    """The lines of a page that are neither code nor tables, with their numbers."""
    is_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and is_prose(line) and not line.startswith("    "):
            yield number, line


def comments(file):
    """Blocks of lines of comments, each a number and the bodies."""
    block, first = [], 0
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        found = re.match(r"^\s*///?(?!<)( ?)(.*)$", line)
        if found:
            if not block:
                first = number
            block.append(found.group(2))
        elif block:
            yield first, block
            block = []


def tracked(*suffixes):
    """The files of the tree's folders with one of these suffixes."""
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*"))
            if file.name.endswith(suffixes) and file.is_file()]


def builds():
    """The files of the build, of the jobs of ./dev and of the project's settings."""
    return [ROOT / "dev", *(ROOT / ".ci").glob("*"), *ROOT.glob("meson*"), *ROOT.glob("*.toml"),
            *(ROOT / ".github").rglob("*.yml"),
            *(ROOT / "subprojects" / "packagefiles").rglob("meson.build"),
            *tracked("meson.build", ".sh", ".toml", ".yml")]


def long_lines():
    for file in {*SOURCES, *tracked(".py", ".pyi", ".h", ".cpp"), *builds()}:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if len(line) > COLUMNS:
                yield place(file, number)
    for page in {*PAGES, *tracked(".md")}:
        for number, line in prose_lines(page):
            if len(line) > COLUMNS:
                yield place(page, number)


def fragments(files):
    for file in files:
        text = file.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(text, 1):
            found = re.match(r"^\s*///(?!<) ?(.*)$", line)
            begins = found and not (number > 1 and re.match(r"^\s*///(?!<)", text[number - 2]))
            if begins and FRAGMENT.match(found.group(1)):
                yield place(file, number)


def python_fragments():
    """Places of docstrings and blocks of comments of Python that begin with a fragment."""
    for file in tracked(".py", ".pyi"):
        if "python" not in file.relative_to(ROOT).parts:
            continue
        last = 0  # the line of the comment before
        for token in tokenize.generate_tokens(io.StringIO(file.read_text("utf-8")).readline):
            is_line = token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
            is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
            if is_docstring or is_line and last != token.start[0] - 1:
                if PYTHON_FRAGMENT.match(token.string.lstrip('"# \n')):
                    yield place(file, token.start[0])
            last = token.start[0] if is_line else last


def sentences(text):
    """The sentences of a text without code and links."""
    text = re.sub(r"`[^`]*`", "x", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.split(r"(?<=[.!?:])\s+", text)


def long_sentences():
    for page in PAGES:
        paragraph, first = [], 0
        for number, line in [*prose_lines(page), (0, "")]:
            if line.strip() and not re.match(r"^\s*(\*|-|\d+\.) ", line):
                first = first or number
                paragraph.append(line.strip())
                continue
            for sentence in sentences(" ".join(paragraph)):
                if len(sentence.split()) > MAX_WORDS:
                    yield place(page, first)
            paragraph, first = ([re.sub(r"^\s*(\*|-|\d+\.) ", "", line)],
                                number) if line.strip() else ([], 0)
    for file in HEADERS:
        for first, block in comments(file):
            prose = " ".join("" if body.startswith("   ") else body for body in block)
            for sentence in sentences(prose):
                if len(sentence.split()) > MAX_WORDS:
                    yield place(file, first)


def free_relatives():
    for file in SOURCES:
        if "lib" in file.relative_to(ROOT).parts:
            for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
                for _ in FREE_RELATIVE.finditer(line):
                    yield place(file, number)


COUNTS = {
    "lines over 100 columns": long_lines,
    "doc comments of headers that begin with a fragment": lambda: fragments(HEADERS),
    "doc comments of the library that begin with a "
    "fragment": lambda: fragments([file for file in SOURCES if file not in HEADERS]),
    "comments and docstrings of Python that begin with a fragment": python_fragments,
    "sentences over 35 words": long_sentences,
    "what it, what is": free_relatives,
}


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--list":
        print("\n".join(next(count for name, count in COUNTS.items() if sys.argv[2] in name)()))
        return 0
    is_right = True
    for name, count in COUNTS.items():
        found = len(list(count()))
        limit = LIMITS.get(name, 0)
        verdict = (" MORE than the limit" if found > limit else
                   " fewer: lower the limit" if found < limit else "")
        print(f"{found:5} {name} (limit {limit}){verdict}")
        is_right &= found <= limit
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
