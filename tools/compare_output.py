#!/usr/bin/env python3
"""compare_output.py EXPECTED PROGRAM [ARGUMENT...]: runs the program; its output must be the file's
text.

In the file … stands for anything within its line. A program that ends with 77 has nothing to show
here: so does this.
"""
import difflib
import pathlib
import re
import subprocess
import sys

SKIPPED = 77


def fits(wanted, line):
    return re.fullmatch('.*'.join(map(re.escape, wanted.split('…'))), line)


def difference(expected, output):
    """Returns how an output differs from the text of a file, as lines of a diff; empty if it does
    not."""
    wanted = pathlib.Path(expected).read_text(encoding='utf-8').splitlines(keepends=True)
    lines = output.splitlines(keepends=True)
    for i, (want, line) in enumerate(zip(wanted, lines)):
        if fits(want, line):
            lines[i] = want
    return ''.join(difflib.unified_diff(wanted, lines, str(expected), 'its output'))


def differs(expected, command):
    """What is wrong with the command's exit status or output, as text; empty if nothing is."""
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode == SKIPPED:
        print(run.stdout, end='')
        sys.exit(SKIPPED)
    if run.returncode != 0:
        return f'{run.stdout}{command[0]} ended with status {run.returncode}\n'
    return difference(expected, run.stdout)


if __name__ == '__main__':
    fault = differs(sys.argv[1], sys.argv[2:])
    print(fault, end='')
    sys.exit(bool(fault))
