#!/usr/bin/env python3
"""Checks the Markdown files against the tree: code is compiled, output is printed, files exist,
texts are thrown.

A block marked cpp stands, but for its indentation, in a source that the build compiles; one marked
python in an example or a test of the package; each line of a meson or cmake block in a file of
tests/install; the lines of a text block in the expected output of an example. Links lead to files,
and to headings of those. The README has at most 150 lines and leads to every page of docs/.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md",
             "bench/METHOD.md", "bench/RESULTS.md"] + PAGES
MAX_README_LINES = 150
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
TREES = "docs|include|lib|hooks|tests|examples|bench|python|tools|subprojects|packaging"


def compiled():
    """The sources that a program of the build is made of, and the headers that only those
    include."""
    folders = ("examples", "tests", "tests/rules", "tests/python", "bench")
    yield from (file for folder in folders for file in sorted((ROOT / folder).glob("*.cpp")))
    yield from sorted((ROOT / "examples").rglob("*.h"))


def stands_in(block, text):
    """True if the block's lines follow each other in the text, all indented by the same more or
    less."""
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
    scripts = [file.read_text(encoding="utf-8") for folder in ("python/examples", "python/tests")
               for file in sorted((ROOT / folder).glob("*.py"))]
    installing = [file.read_text(encoding="utf-8") for file in (ROOT / "tests/install").rglob("*")
                  if file.is_file()]
    for language, block in BLOCK.findall(text):
        first = block.strip().split("\n")[0].strip()
        if language == "cpp" and not any(stands_in(block, source) for source in sources):
            yield f"the block that begins with `{first}` stands in no source that is compiled"
        if language == "python" and not any(stands_in(block, script) for script in scripts):
            yield f"the block that begins with `{first}` stands in no script that is run"
        if language in ("meson", "cmake"):
            for line in filter(None, map(str.strip, block.split("\n"))):
                if not any(line in map(str.strip, file.split("\n")) for file in installing):
                    yield f"`{line}` stands in no file of tests/install"


def slugs(text):
    """The anchors that GitHub gives the headings of a page: lower case, no punctuation, - for a
    space, -1 for a second one."""
    seen = {}
    for heading in re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)    # of a link its words
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        yield slug if seen[slug] == 0 else f"{slug}-{seen[slug]}"


def link_faults(text, name):
    """Links to files, which are named from the page's own folder, and to headings of pages."""
    for target in sorted(set(re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)))):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists():
            yield f"there is no {target}"
        elif anchor and anchor not in slugs(file.read_text(encoding="utf-8")):
            yield f"there is no heading for {target}"


def path_faults(text):
    """Names in backticks that begin with a folder of the tree; * stands for anything."""
    named = set(re.findall(rf"`((?:{TREES})/[\w./*-]+)`", BLOCK.sub("", text)))
    for name in sorted(named
                       - {"tests/NAME.cpp", "include/remat/NAME.h", "tests/rules/rule_NN_*.cpp"}):
        if not any(ROOT.glob(name)) and name not in ("subprojects/remat",
                                                     "tests/compile_fail/*.cpp"):
            yield f"there is no {name}"


def fits(wanted, line):
    """True if a line agrees with a line of an .expected file, in which … stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, wanted.split("…"))), line) is not None


def follow_in(expected, lines):
    """True if lines follow each other in an .expected file."""
    return any(all(map(fits, expected[start:], lines))
               for start in range(len(expected) - len(lines) + 1))


def output_faults(text):
    """The lines of a text block follow each other in an .expected file. Or a program that has none,
    since it prints times, has the words of its first line."""
    expected = [file.read_text(encoding="utf-8").split("\n")
                for folder in ("examples", "python/examples")
                for file in sorted((ROOT / folder).glob("*.expected"))]
    sources = [" ".join(re.findall(r'"([^"]*)"', joined(file.read_text(encoding="utf-8"))))
               for file in sorted((ROOT / "examples").glob("*.cpp"))
               if not file.with_suffix(".expected").exists()]
    for language, block in BLOCK.findall(text):
        lines = block.rstrip("\n").split("\n")
        if language != "text" or any(follow_in(each, lines) for each in expected):
            continue
        words = re.findall(r"[A-Za-z]+", lines[0])
        if not any(all(re.search(rf"\b{word}\b", printed) for word in words)
                   for printed in sources):
            yield f"no example prints what begins with `{lines[0].strip()}`"


def joined(text):
    """A C++ source with its adjacent string literals made one."""
    return re.sub(r'"\s*\n\s*"', "", text)


def note_faults(text):
    sources = [file.read_text(encoding="utf-8")
               for tree in ("include", "lib", "hooks", "python/binding")
               for file in (ROOT / tree).rglob("*.*")]
    for title in sorted(set(re.findall(r"Note \[([^\]]+)\]", text)) - {"Title"}):
        if not any(f"Note [{title}]" in source for source in sources):
            yield f"there is no Note [{title}]"


def readme_faults(text):
    """README.md must have these: few lines, the output, a link to every page."""
    if (lines := text.count("\n")) > MAX_README_LINES:
        yield f"it has {lines} lines, and should have at most {MAX_README_LINES}"
    for page in PAGES:
        if f"]({page})" not in text:
            yield f"it does not link {page}"

    expected = (ROOT / "examples/quickstart.expected").read_text(encoding="utf-8")
    if f"The whole program prints\n\n```text\n{expected}```\n" not in text:
        yield "the output after `The whole program prints` is not examples/quickstart.expected"


def option_faults(text):
    """docs/guide.md must have this: every option with its default."""
    options = (ROOT / "include/remat/options.h").read_text(encoding="utf-8").split(
        "struct CheckpointOptions", 1)[1]
    for name, default in re.findall(r"^  [\w:<>&() ]+ (\w+)(?:\{\}| = ([\w:]+));", options, re.M):
        row = next((line for line in text.split("\n") if re.match(rf"\| `.*\b{name}\b", line)),
                   None)
        if row is None or (default or "empty").split("::")[-1] not in row:
            yield f"the table of options does not show {name} with its default"


def kind_faults(text):
    """docs/errors.md must have this: every kind of error."""
    kinds = (ROOT / "include/remat/error.h").read_text(encoding="utf-8")
    for kind in re.findall(r"^    (\w+),? +///<", kinds, re.M):
        if f"`{kind}`" not in text:
            yield f"the errors do not show {kind}"


def quote_faults(text):
    """Each error text that a table quotes is one that the library throws."""
    thrown = "".join(joined(file.read_text(encoding="utf-8")) for tree in ("lib", "hooks")
                     for file in sorted((ROOT / tree).rglob("*.cpp")))
    for row in re.findall(r"^\|(?: `\w+`)? \| (\"[^|]+) \|", text, re.M):
        for sentence in re.findall(r'"([^"]+)"', row):
            if sentence not in thrown:
                yield f"no error says \"{sentence}\""


def rule_faults(text):
    """Pages for users say what holds; the Rules' numbers are for those who work on the code."""
    for number in sorted(set(re.findall(r"\b[Rr]ules? \d+", text))):
        yield f"it cites {number}"


def faults_of(name, text):
    yield from block_faults(text)
    yield from link_faults(text, name)
    yield from path_faults(text)
    yield from note_faults(text)
    yield from quote_faults(text)
    if name == "README.md" or name in PAGES:
        yield from output_faults(text)
        yield from rule_faults(text)
    if name == "README.md":
        yield from readme_faults(text)
    if name == "docs/guide.md":
        yield from option_faults(text)
    if name == "docs/errors.md":
        yield from kind_faults(text)


def main():
    faults = []
    for name in DOCUMENTS:
        faults += [f"{name}: {fault}"
                   for fault in faults_of(name, (ROOT / name).read_text(encoding="utf-8"))]
    print("\n".join(faults) if faults else "the documents agree with the tree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
