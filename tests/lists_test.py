#!/usr/bin/env python3
"""Every C++ source must stand in the meson.build that builds it, so that no test or body is silently left out."""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# folder of sources: the file that lists them
LISTS = {'lib': 'lib', 'hooks': 'hooks', 'examples': 'examples', 'bench': 'bench',
         'tests': 'tests', 'tests/rules': 'tests', 'tests/support': 'tests', 'tests/python': 'tests/python'}


def main():
    missing = []
    for folder, owner in LISTS.items():
        sources = sorted((ROOT / folder).glob('*.cpp'))
        build_file = ROOT / owner / 'meson.build'
        text = build_file.read_text() if build_file.exists() else ''
        missing += [f"{source.relative_to(ROOT)} is not in {owner}/meson.build" for source in sources
                    if f"{source.name}'" not in text]
    print(*missing, sep='\n')
    return bool(missing)


if __name__ == '__main__':
    sys.exit(main())
