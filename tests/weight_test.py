#!/usr/bin/env python3
"""Measures the weight of the library, and fails where a limit is passed.

Usage: weight_test.py [--table]     prints code lines by folder, the widest classes, the longest
functions

A code line is neither blank nor a comment. A room is a header with its source. The closure of a
folder is every room that its files include, with the sources of those. A class counts functions and
members of its own body; nested types count for themselves. Each limit falls with the number that it
bounds.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("lib", "hooks", "include")
LIMITS = {
    "code lines of lib, hooks and include": 33_360,
    "code lines of the Python package": 9_095,
    "code lines in the closure of lib/frame": 12_081,
    "classes with over 25 functions or 20 members": 1,
    "functions over 100 lines": 1,
}
MAX_FUNCTIONS, MAX_MEMBERS, MAX_LINES = 25, 20, 100
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)


def code_of(file):
    """The text of a C++ file without comments, strings and literals of characters."""
    text = file.read_text(encoding="utf-8")
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'',
                  lambda found: '""' if found[0][0] == '"' else "", text,
                  flags=re.S)


def code_lines(file):
    comment = "#" if file.suffix in (".py", ".pyi") else "//"
    return sum(1 for line in file.read_text(encoding="utf-8").split("\n")
               if line.strip() and not line.strip().startswith(comment))


def files_of(folder, suffixes=(".h", ".cpp")):
    return sorted(file for file in (ROOT / folder).rglob("*") if file.suffix in suffixes)


def folders():
    for top in LIBRARY:
        parts = [path for path in sorted((ROOT / top).iterdir())
                 if path.is_dir()] if top != "include" else [ROOT / top]
        yield from (path.relative_to(ROOT) for path in parts)
    yield from (Path("python/binding"), Path("python/remat"))


def closure(folder):
    """The files that a folder draws in: of each header that is included, its source as well."""
    seen, waiting = set(), files_of(folder)
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        other = file.with_suffix(".cpp" if file.suffix == ".h" else ".h")
        waiting += [other] if other.is_file() else []
        for name in INCLUDE.findall(file.read_text(encoding="utf-8")):
            target = ROOT / ("include/" + name if name.startswith("remat/") else name)
            if target.is_file() and target.relative_to(ROOT).parts[0] in ("lib", "hooks"):
                waiting.append(target)
    return seen


def end_of(text, begin):
    """The place after the brace that closes the one at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def statements(body):
    """The statements of a class's body, each with its first brace block cut out."""
    now, place = "", 0
    while place < len(body):
        letter = body[place]
        if letter == "{":
            place = end_of(body, place)
            is_initializer = re.search(r"[=\w>]\s*$", now) and "(" not in now and not re.search(
                r"\b(class|struct|union|enum)\b", now)
            now += "{}"
            if not is_initializer and not re.match(r"\s*[;,]", body[place:]):
                yield now
                now = ""
            continue
        if letter == ";":
            yield now
            now = ""
        else:
            now += letter
        place += 1


def classes():
    """Each class of lib and hooks: its place, its functions, its members."""
    for file in [*files_of("lib"), *files_of("hooks")]:
        text = code_of(file)
        for found in re.finditer(
            r"\b(?:class|struct)\s+(\w+)(?:\s+final)?(?:\s*:[^:{;][^{;]*)?\s*\{", text):
            body = text[found.end(): end_of(text, found.end() - 1) - 1]
            functions = members = 0
            for each in statements(body):
                words = re.sub(r"\b(public|private|protected)\s*:", "", each).strip()
                words = re.sub(r"^template\s*<[^{}]*?>\s*(?=\w)", "", words)
                if not words or re.match(
                    r"(using|friend|static_assert|typedef|class|struct|enum|union)\b", words):
                    continue
                before_value = re.split(r"(?<![=!<>])=(?!=)",
                                        re.sub(r"operator\S*", "operator", words))[0]
                if "(" in re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", before_value)):
                    functions += 0 if re.search(r"=\s*(delete|default)", words) else 1
                else:
                    members += 1 + before_value.count(",") if "<" not in before_value else 1
            yield f"{file.relative_to(ROOT)} {found[1]}", functions, members


def long_functions():
    """Functions with more than MAX_LINES lines, by their closing brace at the beginning of a
    line."""
    for file in [*files_of("lib"), *files_of("hooks"), *files_of("python/binding")]:
        begin = None
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if re.match(r"[A-Za-z_].*\)?.*\{$",
                        line) and not re.match(r"(namespace|class|struct|enum|extern)\b", line):
                begin = number
            elif line == "}" and begin is not None:
                if number - begin + 1 > MAX_LINES:
                    yield f"{file.relative_to(ROOT)}:{begin}", number - begin + 1
                begin = None


def measured():
    wide = [each for each in classes() if each[1] > MAX_FUNCTIONS or each[2] > MAX_MEMBERS]
    return {
        "code lines of lib, hooks and "
        "include": sum(code_lines(file) for top in LIBRARY for file in files_of(top)),
        "code lines of the Python "
        "package": sum(code_lines(file) for folder in ("python/binding", "python/remat")
                                                for file
                                                in files_of(folder, (".h", ".cpp", ".py", ".pyi"))),
        "code lines in the closure of "
        "lib/frame": sum(code_lines(file) for file in closure("lib/frame")),
        "classes with over 25 functions or 20 members": len(wide),
        "functions over 100 lines": len(list(long_functions())),
    }


def print_table():
    print("| folder | files | code lines |\n|---|--:|--:|")
    for folder in folders():
        files = files_of(folder, (".h", ".cpp", ".py", ".pyi"))
        print(f"| {folder} | {len(files)} | {sum(map(code_lines, files))} |")
    rooms = {file.with_suffix("") for file in closure("lib/frame")}
    print(
        "\n"
        f"rooms in the closure of lib/frame: {len(rooms)}\n"
        "\n"
        "| class | functions | members |\n"
        "|---|--:|--:|")
    for name, functions, members in sorted(
        classes(), key=lambda each: -max(each[1] / MAX_FUNCTIONS, each[2] / MAX_MEMBERS))[:20]:
        print(f"| {name} | {functions} | {members} |")
    print("\n| function | lines |\n|---|--:|")
    for place, lines in sorted(long_functions(), key=lambda each: -each[1]):
        print(f"| {place} | {lines} |")


def main():
    if sys.argv[1:] == ["--table"]:
        print_table()
    is_right = True
    for name, number in measured().items():
        verdict = "" if number == LIMITS[name] else " MORE than the limit" if number > LIMITS[
            name] else " fewer: lower the limit"
        print(f"{number:6} {name} (limit {LIMITS[name]}){verdict}")
        is_right &= number <= LIMITS[name]
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
