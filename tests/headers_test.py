#!/usr/bin/env python3
"""headers_test.py COMPILER [FLAG...]: all public headers together compile without a warning, as
C++20 and as C++23.

With the compiler of the build, and with every other of COMPILERS that is installed. The last line
is `N passed, N failed`.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMPILERS = ('g++-13', 'g++-14', 'clang++', 'clang++-16', 'clang++-19')
STANDARDS = ('c++20', 'c++2b')    # the name that older compilers have for C++23


def main():
    given, flags = [], sys.argv[1:]
    while flags and not flags[0].startswith('-'):
        given.append(flags.pop(0))
    commands = {given[-1].rsplit('/', 1)[-1]: given[-1:]}    # without ccache
    commands |= {name: [name] for name in COMPILERS if shutil.which(name)}
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / 'all_headers.cpp'
        source.write_text(''.join(f'#include <remat/{header.name}>\n'
                                  for header in sorted((ROOT / 'include/remat').glob('*.h'))))
        for name, command in commands.items():
            for standard in STANDARDS:
                run = subprocess.run([*command, *flags, f'-std={standard}', '-Wall', '-Wextra',
                                      '-Werror', '-fsyntax-only',
                                      f'-I{ROOT / "include"}', str(source)], text=True,
                                     stderr=subprocess.PIPE)
                passed, failed = passed + (run.returncode == 0), failed + (run.returncode != 0)
                print(f'{name} -std={standard}: {run.stderr[:3000] or "ok"}', flush=True)
    print(f'{passed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
