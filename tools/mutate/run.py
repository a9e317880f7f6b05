#!/usr/bin/env python3
"""mutate/run.py [FILE...]: plants faults in the library by rule and says which of them no test
notices.

Without a FILE as many are drawn by seed as --count says, at least one in each source; with FILEs
all of theirs run. All are compiled into one build of its own, in build/mutants, and chosen there by
environment (REMAT_MUTANT); the library that is installed has none. A run that is interrupted goes
on where it was: what is known stands in results.jsonl.

Each test case that reaches a place runs, the quick ones first, until one fails. A crash and a run
that takes too long count as noticed. What survives is either listed in tests/mutants.txt with a
reason, or wants a test.
"""

import argparse
import collections
import difflib
import json
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import time

import library

ROOT = library.ROOT
REASONS = ROOT / 'tests' / 'mutants.txt'
PROGRAMS = ('cases', 'device')
# What `./dev test --all` runs besides, for what the cases do not notice.
RANDOM_PROGRAMS = (
    ('fuzz', '--seeds', '0:2000', '--first'),
    ('fuzz', '--selective', '--seeds', '30000:32000', '--first'),
    ('fuzz', '--arguments', '--seeds', '50000:52000', '--first'),
)
BATCH_SECONDS = (0.3, 3, 15, 1e9)    # cases run in batches whose times add up to this
TO_START = 15                        # seconds that a process may take besides


def say(text):
    print(text, file=sys.stderr, flush=True)


def limit_process():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))


class Tests:
    """The cases of the test programs, run with the library with faults: which places each reaches,
    and what it takes."""

    def __init__(self, build, folder, kind, seconds, random):
        self.build, self.folder, self.kind = build, folder, kind
        self.seconds, self.random = seconds, random
        self.environment = dict(os.environ, LD_LIBRARY_PATH=str(folder / 'lib'),
                                OMP_WAIT_POLICY='passive')
        self.before = []
        if kind == 'locks':
            self.tsan = (f'suppressions={ROOT}/tools/tsan.supp:allocator_may_return_null=1:'
                         'exitcode=66:halt_on_error=')
            self.environment['TSAN_OPTIONS'] = self.tsan + '1'
            compiler = os.environ.get('CXX', 'g++').split()[-1]
            found = subprocess.run([compiler, '-print-file-name=libtsan.so'], text=True,
                                   stdout=subprocess.PIPE).stdout
            self.environment['LD_PRELOAD'] = found.strip()
            if subprocess.run(['setarch', '-R', 'true'], stderr=subprocess.DEVNULL).returncode == 0:
                self.before = ['setarch', '-R']
        self.reached_by = collections.defaultdict(list)    # place: [(seconds, program, case)]

    def run(self, command, seconds, **environment):
        """(exit status or 'hang', output)"""
        process = subprocess.Popen([*self.before, *map(str, command)],
                                   env={**self.environment, **environment},
                                   cwd=self.folder, text=True, errors='replace',
                                   stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, preexec_fn=limit_process,
                                   start_new_session=True)
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            return 'hang', output

    def trace(self):
        """Runs every case once without a fault. A case that fails so is left out, or that has a
        race already: what is not instrumented, tests and LibTorch, synchronizes unseen."""
        for program in PROGRAMS:
            path = self.folder / f'trace-{program}.txt'
            stamp = self.folder / f'trace-{program}.of'
            binary, library = self.build / 'tests' / program, next((self.folder / 'lib').iterdir())
            of = f'{binary.stat().st_mtime_ns} {library.stat().st_mtime_ns}'
            if not (path.exists() and stamp.exists() and stamp.read_text() == of):
                say(f'running tests/{program} once, to see which places each case reaches')
                path.unlink(missing_ok=True)
                more = {'TSAN_OPTIONS': self.tsan + '0'} if self.kind == 'locks' else {}
                status, output = self.run([self.build / 'tests' / program], 3000,
                                          REMAT_MUTANT_TRACE=str(path), **more)
                if status not in range(0, 256):
                    say(f'{output[-3000:]}\ntests/{program} dies without a fault ({status})')
                    raise SystemExit(1)
                *cases, _ = re.split(r'^case ended: (.*)$', output, flags=re.M)
                (self.folder / f'races-{program}.txt').write_text(''.join(
                    f'{name}\n' for said, name in zip(cases[::2], cases[1::2])
                    if 'WARNING: ThreadSanitizer' in said))
                stamp.write_text(of)
            races = set((self.folder / f'races-{program}.txt').read_text().splitlines())
            always, passing = [], []
            for line in path.read_text().splitlines():
                name, seconds, places = line.split('\t')
                seconds = float(seconds)
                if name in races:
                    say(f'left out, as it has a race without a fault: {name}')
                    continue
                if seconds < 0:
                    say(f'left out, as it fails without a fault: {name}')
                    continue
                if name:
                    passing.append((seconds, program, name))
                for place in map(int, places.split()):
                    if name:
                        self.reached_by[place].append(passing[-1])
                    else:
                        always.append(place)
            # What is reached when the program starts concerns every case; a quick few will do.
            for place in always:
                self.reached_by[place] += sorted(passing)[:100]

    def batches(self, place):
        """(program, names, seconds) in the order in which they run."""
        left, allowed = sorted(set(self.reached_by[place])), self.seconds
        while left and sum(seconds for seconds, _, _ in left) > allowed and len(left) > 1:
            left.pop()
        for most in BATCH_SECONDS:
            taken, total = [], 0.0
            while left and (not taken or total + left[0][0] <= most):
                total += left[0][0]
                taken.append(left.pop(0))
            for program in PROGRAMS:
                names = [name for _, of, name in taken if of == program]
                if names:
                    yield program, names, sum(s for s, of, _ in taken if of == program)

    def notices(self, number, place):
        """What noticed the fault, in words; '' for nothing."""
        chosen = {'REMAT_MUTANT': str(number)}
        slower = 30 if self.kind == 'locks' else 6
        for program, names, seconds in self.batches(place):
            file = self.folder / 'names.txt'
            file.write_text(
                ''.join('"{}"\n'.format(re.sub(r'(["\\,\[])', r'\\\1', name)) for name in names))
            status, output = self.run([self.build / 'tests' / program, '--abort', '-f', file],
                                      TO_START + slower * seconds, **chosen)
            if status == 'hang':
                return f'hang in {program}'
            if self.kind == 'locks' and 'WARNING: ThreadSanitizer: data race' in output:
                return 'data race'
            if status != 0 and 'No test cases matched' not in output:
                failed = re.search(r'^(\S+\.cpp:\d+): FAILED|LEFT BEHIND by (".*")', output, re.M)
                what = (failed[1] or failed[2]) if failed else f'{program}: status {status}'
                return re.sub(r'^(\.\./)+', '', what)
        if self.kind == 'locks' or not self.random:
            return ''
        for program, *arguments in RANDOM_PROGRAMS:
            path = self.build / 'tests' / program
            if path.exists() and self.reached_by[place]:
                status, _ = self.run([path, *arguments], 600, **chosen)
                if status != 0:
                    return ' '.join([program, *arguments[:-1]])
        return ''


def draw(all_places, count, seed, files):
    """The mutations that run: [(place, mutation)]."""
    every = [(place, each) for place in all_places for each in place.mutations]
    if files:
        wanted = [str(pathlib.Path(file).resolve().relative_to(ROOT)) for file in files]
        return [each for each in every if each[0].path in wanted]
    chance = random.Random(seed)
    by_source, by_rule = collections.defaultdict(list), collections.defaultdict(list)
    for each in every:
        by_source[each[0].path].append(each)
        by_rule[each[1].rule].append(each)
    drawn = {}

    def take(some):
        rules = sorted({mutation.rule for _, mutation in some})
        rule = chance.choice(rules)
        place, mutation = chance.choice([each for each in some if each[1].rule == rule])
        drawn[mutation.id] = (place, mutation)

    for path in sorted(by_source):
        take(by_source[path])
    while len(drawn) < min(count, len(every)):
        take(by_rule[chance.choice(sorted(by_rule))])
    return list(drawn.values())


def reasons():
    """{id: reason} of tests/mutants.txt."""
    found = {}
    if REASONS.exists():
        for line in REASONS.read_text().splitlines():
            if line and not line.startswith('#'):
                identity, _, reason = line.split(' | ', 2)
                found[identity] = reason
    return found


def as_diff(place, mutation):
    text = (ROOT / place.path).read_text()
    begin = text.rfind('\n', 0, place.begin) + 1
    end = text.find('\n', place.end)
    before = text[begin:end]
    instead = mutation.text if place.form != 'statement' else ';'
    after = text[begin:place.begin] + instead + text[place.end:end]
    lines = difflib.unified_diff(before.split('\n'), after.split('\n'), lineterm='', n=0)
    return '\n'.join('    ' + line for line in list(lines)[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0],
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument('files', nargs='*', metavar='FILE',
                        help='all mutations of these sources, instead of a drawn few')
    parser.add_argument('--build', default='build', help='the build folder whose tests run (build)')
    parser.add_argument('--count', type=int, default=200, help='how many are drawn (200)')
    parser.add_argument('--seed', type=int, default=1, help='by which seed (1)')
    parser.add_argument('--locks', action='store_true',
                        help='drop locks instead, under the thread sanitizer')
    parser.add_argument('--seconds', type=float, default=1e9,
                        help='of the cases for one fault; the slowest are left out')
    parser.add_argument('--no-random', action='store_true',
                        help='no random programs for what no case notices')
    parser.add_argument('--again', action='store_true', help='run those again that survived before')
    parser.add_argument('--only', nargs='*', metavar='ID', default=[],
                        help='run these, whatever is known of them')
    parser.add_argument('--list', action='store_true', help='say which would run, and stop')
    given = parser.parse_args()

    build = (ROOT / given.build).resolve()
    kind = 'locks' if given.locks else 'faults'
    made = library.Library(build, kind)
    made.make(say)
    drawn = draw(made.places, given.count, given.seed, given.files)
    if given.only:
        drawn = [(place, each) for place in made.places for each in place.mutations
                 if each.id in given.only]
    if given.list:
        for place, each in drawn:
            print(
                f'{each.id} {place.path}:{place.line} {each.rule}: {place.original} => {each.text}')
        return 0

    tests = Tests(build, made.folder, kind, given.seconds, not given.no_random)
    tests.trace()
    results_path = made.folder / 'results.jsonl'
    known = {}
    if results_path.exists():
        for line in results_path.read_text().splitlines():
            result = json.loads(line)
            known[result['id']] = result
    for count, (place, each) in enumerate(drawn):
        is_known = each.id in known and not given.only and (known[each.id]['noticed']
                                                            or not given.again)
        if is_known:
            continue
        start = time.monotonic()
        by = tests.notices(each.number, place.number)
        known[each.id] = {'id': each.id, 'place': f'{place.path}:{place.line}', 'rule': each.rule,
                          'noticed': by,
                          'cases': len(tests.reached_by[place.number]),
                          'seconds': round(time.monotonic() - start, 1)}
        with results_path.open('a') as file:
            file.write(json.dumps(known[each.id]) + '\n')
        say(f'{count + 1}/{len(drawn)} {each.id} {place.path}:{place.line} {each.rule}: '
            f'{by or "SURVIVED"} ({known[each.id]["cases"]} cases, {known[each.id]["seconds"]} s)')

    why = reasons()
    counts = collections.defaultdict(lambda: [0, 0])
    unexplained = 0
    print('Survivors:')
    for place, each in drawn:
        noticed = bool(known[each.id]['noticed'])
        counts[each.rule][not noticed] += 1
        if noticed:
            continue
        unexplained += each.id not in why
        reached = '' if known[each.id]['cases'] else ' (no case reaches it)'
        print(f'{each.id} {place.path}:{place.line} {each.rule}{reached}\n'
              f'{as_diff(place, each)}\n'
              f'    {"reason: " + why[each.id] if each.id in why else "NO REASON"}')
    print('\nRule, noticed, survived:')
    for rule, (noticed, survived) in sorted(counts.items()):
        print(f'  {rule}: {noticed}, {survived}')
    noticed = sum(each[0] for each in counts.values())
    print(f'{len(drawn)} faults, {noticed} noticed ({100 * noticed / max(1, len(drawn)):.1f} %), '
          f'{len(drawn) - noticed} survived, {unexplained} of them without a reason in '
          f'{REASONS.relative_to(ROOT)}')
    return unexplained > 0


if __name__ == '__main__':
    sys.exit(main())
