#!/usr/bin/env python3
"""sum_tests.py BUILD_DIR: adds up Meson's last test run, names its slowest tests; the last line is
`N passed, N failed`.

A Catch2 program counts case by case, a script whose last line is `N passed, N failed` counts what
it says, any other test counts one. Exits 1 when something failed or nothing ran.
"""
import json
import pathlib
import re
import sys

SKIPPED = 77                  # exit status by which a test says that it has nothing to run here
LOG_LINES = 400               # shown of each failed test; the whole log is where Meson says
SLOWEST = 10                  # tests whose seconds are printed


def count(test):
    """(passed, failed) of one entry of testlog.json."""
    output, errors, status = test['stdout'], test.get('stderr', ''), test['returncode']
    if status == SKIPPED:
        return 0, 0
    passed = failed = None
    # Catch2's console reporter ends with one of two lines; v2 and v3 agree on the words. The last
    # one counts: a case may have run its own program for another case.
    ends = list(re.finditer(
        r'^All tests passed \(.* in (\d+) test cases?\)|^test cases: *\d+ *\|(.*)$', output, re.M))
    if ends and ends[-1][1]:
        passed, failed = int(ends[-1][1]), 0
    elif ends:
        counts = {word: int(number)
                  for number, word in re.findall(r'(\d+) (passed|failed)\b(?! as)', ends[-1][2])}
        passed, failed = counts.get('passed', 0), counts.get('failed', 0)
    elif re.search(r'^No test(s ran| cases matched)', output, re.M):
        return 0, 0
    elif found := re.search(r'^(\d+) passed, (\d+) failed\s*\Z', output, re.M):
        passed, failed = int(found[1]), int(found[2])
    # The listener of the tests speaks after Catch2 has counted those cases as passed.
    if found := re.search(r'^(\d+) test cases left something behind', errors, re.M):
        left = min(int(found[1]), passed or 0)
        passed, failed = (passed or 0) - left, (failed or 0) + left
    if passed is None:        # one test, or one that died before it could sum up
        passed, failed = int(status == 0), 0
    if status != 0 and failed == 0:
        failed = 1
    return passed, failed


def seconds(test, name):
    """(seconds, name) of each test in one entry of testlog.json; a Catch2 program names its slowest
    cases itself."""
    cases = re.findall(r'^took ([\d.e+-]+) s: (.*)$', test.get('stderr', ''), re.M)
    return [(float(taken), f'{name}: {case}')
            for taken, case in cases] or [(test['duration'], name)]


def main():
    log = pathlib.Path(sys.argv[1]) / 'meson-logs' / 'testlog.json'
    tests = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    totals, took = [0, 0], []
    for test in tests:
        passed, failed = count(test)
        totals = [totals[0] + passed, totals[1] + failed]
        name = test['name'].split(' / ')[-1]
        took += seconds(test, name)
        if failed:
            text = (test['stdout'] + test.get('stderr', '')).rstrip().splitlines()
            print(f'\n==== {name} ({test["result"]}) ====', *text[-LOG_LINES:], sep='\n')
        elif test['returncode'] == SKIPPED:
            print(f'{name}: skipped. {test["stdout"].strip()}')
        else:
            print(f'{name}: {passed} passed')
    print(f'The {SLOWEST} slowest tests, with others beside them:')
    for taken, name in sorted(took, reverse=True)[:SLOWEST]:
        print(f'  {taken:6.1f} s  {name}')
    print(f'{totals[0]} passed, {totals[1]} failed')
    return totals[1] > 0 or totals[0] == 0


if __name__ == '__main__':
    sys.exit(main())
