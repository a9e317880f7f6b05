#!/usr/bin/env python3
"""Every C++ source and every script of checks must stand in the meson.build that uses it, so that
none is left out."""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# folder of sources: the file that lists them
LISTS = {'hooks/pack': 'hooks', 'hooks/depot': 'hooks', 'hooks/host': 'hooks',
         'hooks/disk': 'hooks',
         'examples': 'examples', 'bench': 'bench', 'tests': 'tests', 'tests/rules': 'tests',
         'tests/device': 'tests', 'tests/support': 'tests', 'tests/fuzz': 'tests',
         'tests/python': 'tests/python'}
LISTS |= {f'lib/{folder.name}': f'lib/{folder.name}' for folder in (ROOT / 'lib').iterdir()
          if folder.is_dir()}


def main():
    missing = []
    for folder, owner in LISTS.items():
        build_file = ROOT / owner / 'meson.build'
        text = build_file.read_text() if build_file.exists() else ''
        for source in sorted((ROOT / folder).glob('*.cpp')):
            if f"{source.name}'" not in text:
                missing.append(f'{source.relative_to(ROOT)} is not in {owner}/meson.build')
        for script in sorted((ROOT / folder).glob('*_test.py')):
            if f"'{script.stem.removesuffix('_test')}'" not in text:
                missing.append(f'{script.relative_to(ROOT)} is not in {owner}/meson.build')
    print(*missing, sep='\n')
    return bool(missing)


if __name__ == '__main__':
    sys.exit(main())
