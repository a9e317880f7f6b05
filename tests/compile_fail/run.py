#!/usr/bin/env python3
"""run.py COMPILER [FLAG...]: every .cpp beside this file must fail to compile, with the words of
its line 1.

Line 1 is `// expect: TEXT`, or `// first line: TEXT` if TEXT must stand in the first error or, with
clang, in the first note below it. TEXT ends where its last word does. Line 2 may be
`// flags: FLAG...`, which come last. The last line printed is `N passed, N failed`.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Precompiled once for all cases that have no flags of their own, since LibTorch takes longer than a
# case.
PREFIX = ('torch/csrc/jit/api/compilation_unit.h', 'torch/nn/modules/linear.h', 'remat/apply.h',
          'remat/checkpoint.h')
# clang says in a note which function is deleted.
FIRST_NOTE = r'(?:(?:\n(?!.*(?:error|note): ).*)*\n.*note: .*)?'


def fault(case, compiler, prefix):
    """The fault of a case; empty if it fails to compile as it should."""
    first, second = case.read_text().split('\n', 2)[:2]
    mark, _, expected = first.partition(': ')
    if mark not in ('// expect', '// first line') or not expected.strip():
        return f'line 1 is not `// expect: TEXT` or `// first line: TEXT`: {first}'
    flags = second.removeprefix('// flags: ').split() if second.startswith('// flags: ') else []
    flags = flags or ['-include', prefix]
    run = subprocess.run([*compiler, *flags, '-fsyntax-only', str(case)], capture_output=True,
                         text=True)
    output = run.stdout + run.stderr
    if run.returncode == 0:
        return 'it compiles'
    if mark == '// first line':
        found = re.search(r'error: .*' + (FIRST_NOTE if any('clang' in word for word in compiler)
                                          else ''), output)
        output = found[0] if found else output
    if not re.search(re.escape(expected.strip()) + r'(?!\w)', output):
        return f'it fails without saying "{expected.strip()}":\n{output[:3000]}'
    return ''


def main():
    cases = sorted(pathlib.Path(__file__).parent.glob('*.cpp'))
    compiler = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(
        os.cpu_count()) as pool:
        prefix = f'{folder}/prefix.h'
        pathlib.Path(prefix).write_text(''.join(f'#include <{header}>\n' for header in PREFIX))
        subprocess.run([*compiler, '-x', 'c++-header', prefix, '-o', f'{prefix}.gch'], check=True)
        faults = list(pool.map(lambda case: fault(case, compiler, prefix), cases))
    for case, what in zip(cases, faults):
        print(f'{case.stem}: {what or "ok"}')
    failed = sum(map(bool, faults))
    print(f'{len(cases) - failed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
