#!/usr/bin/env python3
"""Compares the places that state the version with include/remat/version.h, where it is defined."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Each pattern's group is a version: of three numbers, or of the first two.
STATED = {
    "CHANGELOG.md": r"^## (\d+\.\d+\.\d+)",
    "README.md": r"find_package\(remat (\d+\.\d+)|remat-(\d+\.\d+\.\d+)",
    "docs/installing.md": r"find_package\(remat "
                          r"(\d+\.\d+)|remat-(\d+\.\d+\.\d+)|`v(\d+\.\d+\.\d+)`",
    "packaging/conan/test_package/CMakeLists.txt": r"find_package\(remat (\d+\.\d+)",
    "tests/install/cmake/CMakeLists.txt": r"find_package\(remat (\d+\.\d+)",
}
# These take the version from the header, and state none.
READ_IT = {
    "meson.build": "include/remat/version.h",
    "pyproject.toml": 'dynamic = ["version"]',
    "packaging/cmake/CMakeLists.txt": "remat/version.h",
    "packaging/conan/conanfile.py": "'version.h'",
    "packaging/python/backend.py": "include/remat/version.h",
    "python/remat/__init__.py": "__version__ = _build.version",
}


def main():
    text = (ROOT / "include/remat/version.h").read_text(encoding="utf-8")
    version = re.search(r'^#define REMAT_VERSION "(.*?)"', text, re.M)[1]
    numbers = ".".join(re.search(rf"^#define REMAT_VERSION_{part} (\d+)", text, re.M)[1]
                       for part in ("MAJOR", "MINOR", "PATCH"))
    wrong = [] if numbers == version else [
        f"include/remat/version.h states {numbers} by numbers, and {version} as text"]
    for path, pattern in STATED.items():
        found = [next(filter(None, each.groups()))
                 for each in re.finditer(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M)]
        if path == "CHANGELOG.md":
            found = found[:1]    # the newest
        if not found:
            wrong.append(f"{path} states no version in the expected form: {pattern}")
        wrong += [f"{path} states {each}, and include/remat/version.h {version}" for each in found
                  if not f"{version}.".startswith(f"{each}.")]
    for path, words in READ_IT.items():
        body = (ROOT / path).read_text(encoding="utf-8")
        if words not in body:
            wrong.append(
                f"{path} does not take the version from include/remat/version.h: `{words}` is "
                "missing")
        if re.search(rf"\b{re.escape(version)}\b", body):
            wrong.append(f"{path} states the version {version} itself")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
