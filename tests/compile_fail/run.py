#!/usr/bin/env python3
"""run.py COMPILER [FLAG...]: every .cpp beside this file must fail to compile, with the words of its line 1.

Line 1 is `// expect: TEXT`. The last line printed is `N passed, N failed`.
"""
import concurrent.futures
import os
import pathlib
import subprocess
import sys


def fault(case, compiler):
    """What is wrong with a case; empty if it fails to compile as it should."""
    first = case.read_text().partition('\n')[0]
    mark, _, expected = first.partition(': ')
    if mark != '// expect' or not expected.strip():
        return f'line 1 is not `// expect: TEXT`: {first}'
    run = subprocess.run([*compiler, '-fsyntax-only', str(case)], capture_output=True, text=True)
    output = run.stdout + run.stderr
    if run.returncode == 0:
        return 'it compiles'
    if expected.strip() not in output:
        return f'it fails without saying "{expected.strip()}":\n{output[:3000]}'
    return ''


def main():
    cases = sorted(pathlib.Path(__file__).parent.glob('*.cpp'))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = list(pool.map(lambda case: fault(case, sys.argv[1:]), cases))
    for case, what in zip(cases, faults):
        print(f'{case.stem}: {what or "ok"}')
    failed = sum(map(bool, faults))
    print(f'{len(cases) - failed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
