#!/usr/bin/env python3
"""faults_test.py FUZZ_FAULTS: the fuzzer finds every fault planted in its library, and nothing
without one.

The last line is `N passed, N failed`.
"""
import os
import pathlib
import re
import subprocess
import sys
import time

HEADER = pathlib.Path(__file__).resolve().parents[2] / 'lib' / 'base' / 'planted_fault.h'
# Nearly all are found within seconds, and all within 60 on an idle machine; a busy one gets four
# times that.
TO_FIND = ['--seconds', '240']
WITHOUT = ['--seeds', '0:1000']     # for the library without a fault, which must give no finding

# Faults that show only if functions do more with their arguments than compute.
ABOUT_ARGUMENTS = {'WrittenArgument', 'ReplacedArgument', 'ArgumentObject', 'HookTwice'}


def names():
    text = re.search(r'enum class Fault \{(.*?)\n\};', HEADER.read_text(encoding='utf-8'), re.S)[1]
    return re.findall(r'^\s*(\w+),', text, re.M)


def run(program, number, arguments):
    """(whether something was found, programs tried, seconds, output)"""
    start = time.monotonic()
    done = subprocess.run([program, *arguments, '--first'], capture_output=True, text=True,
                          env=dict(os.environ, REMAT_PLANTED_FAULT=str(number)))
    summary = re.search(r'^(\d+) programs, (\d+) findings\s*\Z', done.stdout, re.M)
    if not summary:
        sys.exit(f'{program} died:\n{done.stdout}{done.stderr}')
    return int(summary[2]) > 0, int(summary[1]), time.monotonic() - start, done.stdout


def main():
    program, passed, failed = sys.argv[1], 0, 0
    for number, name in enumerate(names()):
        arguments = TO_FIND if number else WITHOUT
        if name.startswith('Kept'):     # only regions with policies keep results
            arguments = ['--selective', *arguments]
        if name in ABOUT_ARGUMENTS:
            arguments = ['--arguments', *arguments]
        if name.startswith('Buffer'):   # only modules have buffers that recomputes restore
            arguments = ['--modules', *arguments]
        is_found, programs, seconds, output = run(program, number, arguments)
        what = output.splitlines()[0] if is_found else 'nothing'
        if number:
            word = 'found' if is_found else 'NOT FOUND'
            print(f'fault {name}: {word} after {programs} programs, {seconds:.1f} s ({what})',
                  flush=True)
        else:
            print(f'no fault: {what} found in {programs} programs, {seconds:.1f} s', flush=True)
        passed, failed = (passed + 1, failed) if is_found == bool(number) else (passed, failed + 1)
    print(f'{passed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
