#!/usr/bin/env python3
"""compare_output.py EXPECTED PROGRAM [ARGUMENT...]: runs the program; its output must be the file's text."""
import difflib
import pathlib
import subprocess
import sys


def differs(expected, command):
    """What is wrong with the command's exit status or output, as text; empty if nothing is."""
    wanted = pathlib.Path(expected).read_text()
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        return f'{run.stdout}{command[0]} ended with status {run.returncode}\n'
    return ''.join(difflib.unified_diff(
        wanted.splitlines(keepends=True), run.stdout.splitlines(keepends=True), str(expected), 'its output'))


if __name__ == '__main__':
    fault = differs(sys.argv[1], sys.argv[2:])
    print(fault, end='')
    sys.exit(bool(fault))
