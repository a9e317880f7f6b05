#!/usr/bin/env python3
"""matrix.py [--library | --random] [--again] [--keep] [VERSION...]: builds and tests the tree on
many LibTorch, one after the other.

Each version is installed from the package index into an environment of its own under build/matrix,
with what its wheel needs to load (up to 6 GB), which is deleted when the version is done. Builds
the library, the Catch2 programs and the Python package and runs them; with --library the library
and examples/quickstart.cpp alone, with --random these and random programs, whose gradients are
compared with plain autograd (tests/fuzz, a third of the time). A case that ends the process is
counted as failed, and those after it run in another. What is done stands in
build/matrix/results.jsonl, with the commit, and is not done again. The last thing printed is a
table.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.sax

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / 'build' / 'matrix'
VERSIONS = ('2.6.0', '2.7.1', '2.8.0', '2.9.1', '2.10.0', '2.11.0', '2.12.1', '2.13.0', '2.14.1',
            '2.15.0')
JOBS = os.environ.get('JOBS', str(os.cpu_count()))


# Ways to draw random programs, and how long each [seconds].
RANDOM = ((), ('--selective',), ('--arguments',), ('--moves', '--selective'))
RANDOM_SECONDS = 30
CASE_SECONDS = 3600    # what one run of a Catch2 program, or of a file of Python's tests, may take


class Failed(Exception):
    """A step did not go through: its name, with the compiler's or program's first words about
    it."""


class Cases(xml.sax.ContentHandler):
    """The cases of one run of Catch2 from its XML, which ends anywhere if the process did: {name:
    where it failed}."""

    def __init__(self):
        super().__init__()
        self.of, self.case, self.ended = {}, None, True

    def startElement(self, name, attributes):
        if name == 'TestCase':
            self.case, self.ended = attributes['name'], False
            self.of[self.case] = []
        elif attributes.get('success') == 'false':
            if name == 'OverallResult':
                self.of[self.case] = self.of[self.case] or ['failed']
            elif 'filename' in attributes:
                place = re.sub(r'^(\.\./)+', '', attributes['filename'])
                self.of[self.case].append(f'{place}:{attributes["line"]}')

    def endElement(self, name):
        self.ended = self.ended or name == 'TestCase'

    @staticmethod
    def read(path):
        cases = Cases()
        parser = xml.sax.make_parser()
        parser.setContentHandler(cases)
        try:
            parser.parse(str(path))
        except xml.sax.SAXParseException:
            pass
        return cases


class Version:
    def __init__(self, name, log):
        self.name, self.log = name, log
        self.folder = WORK / name
        self.environment = self.folder / 'environment'
        self.build = self.folder / 'build'
        self.python = self.environment / 'bin' / 'python'
        # Its python3 comes first: the build takes the torch of that one.
        self.variables = dict(os.environ, PATH=f'{self.environment}/bin:{os.environ["PATH"]}',
                              OMP_WAIT_POLICY='passive')
        self.variables.pop('TORCH_ROOT', None)

    def call(self, step, *command, check=True, **more):
        self.log.write('+ ' + ' '.join(map(str, command)) + '\n')
        self.log.flush()
        done = subprocess.run(list(map(str, command)), text=True, errors='replace',
                              stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env={**self.variables, **more}, cwd=ROOT)
        self.log.write(done.stdout)
        self.log.flush()
        if check and done.returncode != 0:
            words = re.search(r'^.*(?:\berror\b|ERROR|Error).*$', done.stdout, re.M)
            raise Failed(
                f'{step}: {words[0].strip()[:300] if words else "status " + str(done.returncode)}')
        return done

    def install(self):
        if not self.python.exists():
            self.call('environment', sys.executable, '-m', 'venv', self.environment)
        self.call('install', self.python, '-m', 'pip', 'install', '--disable-pip-version-check',
                  '-q', f'torch=={self.name}',
                  'numpy', 'setuptools', *(() if shutil.which('ninja') else ('ninja',)))
        self.root = self.call('torch', self.python, '-I', '-c',
                              'import importlib.util, os; '
                              'print(os.path.dirname(importlib.util.find_spec("torch").origin))'
                              ).stdout.strip()

    def configure(self, *options):
        how = ['--wipe'] if (self.build / 'meson-private').exists() else []
        self.call('configure', os.environ.get('MESON', 'meson'), 'setup', *how, self.build,
                  f'-Dtorch_root={self.root}',
                  '-Dbench=disabled', *options)

    def compile(self, *targets):
        done = self.call('build', 'ninja', '-C', self.build, '-k', '0', '-j', JOBS, *targets)
        return len(re.findall(r'^\.\./.*warning: ', done.stdout, re.M))

    def library(self):
        self.configure('-Dtests=disabled', '-Dexamples=enabled', '-Dpython=disabled')
        warnings = self.compile('examples/quickstart')
        fits = self.call('quickstart', sys.executable, ROOT / 'tools/compare_output.py',
                         ROOT / 'examples/quickstart.expected',
                         self.build / 'examples/quickstart', check=False)
        return {'library': 'builds', 'quickstart': 'ok' if fits.returncode == 0
                else fits.stdout[-300:], 'warnings': warnings}

    def random(self):
        self.configure('-Dtests=enabled', '-Dexamples=enabled', '-Dpython=disabled')
        warnings = self.compile('examples/quickstart', 'tests/fuzz')
        fits = self.call('quickstart', sys.executable, ROOT / 'tools/compare_output.py',
                         ROOT / 'examples/quickstart.expected',
                         self.build / 'examples/quickstart', check=False)
        result = {'library': 'builds', 'quickstart': 'ok' if fits.returncode == 0
                  else fits.stdout[-300:], 'warnings': warnings,
                  'random_passed': 0, 'random_failed': 0, 'random_failing': []}
        for how in RANDOM:
            done = self.call('fuzz', self.build / 'tests/fuzz', *how, '--seconds', RANDOM_SECONDS,
                             check=False)
            ran = re.search(r'^(\d+) programs, (\d+) findings', done.stdout, re.M)
            found = int(ran[2]) if ran else 1
            result['random_passed'] += int(ran[1]) - found if ran else 0
            result['random_failed'] += found
            result['random_failing'] += [' '.join((*how, seed))
                                         for seed in re.findall(r'^seed (\d+)', done.stdout, re.M)]
            if not ran:
                result['random_failing'].append(
                    ' '.join((*how, f'the process ended with {done.returncode}')))
        return result

    def catch(self, program):
        """Runs all cases of tests/PROGRAM, in several processes if some end theirs: {case: where it
        failed}."""
        listed = self.call(program, self.build / 'tests' / program, '--list-test-names-only',
                           check=False)
        left = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
        found, names, path = {}, self.folder / 'names.txt', self.folder / f'{program}.xml'
        while left:
            names.write_text(
                ''.join('"{}"\n'.format(re.sub(r'(["\\,\[])', r'\\\1', name)) for name in left))
            path.unlink(missing_ok=True)
            done = self.call(program, 'timeout', CASE_SECONDS, self.build / 'tests' / program, '-r',
                             'xml', '-o', path, '-f',
                             names, check=False)
            cases = Cases.read(path)
            if not cases.ended:
                cases.of[cases.case] = [f'the process ended with {done.returncode}']
            for name in re.findall(r'^LEFT BEHIND by "(.*)":', done.stdout, re.M):
                cases.of.setdefault(name, []).append('left something behind')
            found |= cases.of
            left = [name for name in left if name not in cases.of]
            if not cases.of:
                break
        return found | {name: ['not run'] for name in left}

    def everything(self):
        self.configure('-Dtests=enabled', '-Dexamples=disabled', '-Dpython=auto')
        result = {'library': 'builds', 'warnings': self.compile('tests/cases')}
        for program in ('cases', 'device'):
            try:
                if program != 'cases':
                    self.compile(f'tests/{program}')
                found = self.catch(program)
                failed = {name: where[:3] for name, where in found.items() if where}
                result |= {f'{program}_passed': len(found) - len(failed),
                           f'{program}_failed': len(failed),
                           f'{program}_failing': failed}
            except Failed as failure:
                result |= {f'{program}_passed': 0, f'{program}_failed': 1,
                           f'{program}_failing': {'build': str(failure)}}
        try:
            self.compile('python-package', 'tests/libstand_in.so')
            counts, failing = {'passed': 0, 'failed': 0, 'skipped': 0}, []
            for file in sorted((ROOT / 'python/tests').glob('test_*.py')):
                done = self.call('python', 'timeout', CASE_SECONDS, self.python, '-W', 'ignore',
                                 '-m', 'unittest', '-v', file.stem,
                                 check=False, PYTHONPATH=f'{self.build}/python:python/tests',
                                 REMAT_STAND_IN=self.build / 'tests/libstand_in.so')
                ran = re.search(r'^Ran (\d+) tests?', done.stdout, re.M)
                end = done.stdout[ran.start():] if ran else ''
                number = {word: sum(map(int, re.findall(rf'{word}=(\d+)', end)))
                          for word in ('failures', 'errors', 'skipped')}
                bad = number['failures'] + number['errors']
                counts['failed'] += bad if ran else 1
                counts['skipped'] += number['skipped']
                counts['passed'] += int(ran[1]) - bad - number['skipped'] if ran else 0
                failing += re.findall(r'^(?:FAIL|ERROR): (\S+ \S+)', done.stdout, re.M)
                if not ran:
                    failing.append(f'{file.stem}: the process ended with {done.returncode}')
            result |= {f'python_{what}': number
                       for what, number in counts.items()} | {'python_failing': failing}
        except Failed as failure:
            result |= {'python_passed': 0, 'python_failed': 1, 'python_failing': [str(failure)]}
        return result


def run(name, kind, keep):
    start = time.monotonic()
    commit = subprocess.run(['git', 'describe', '--always', '--dirty', '--abbrev=12'], text=True,
                            stdout=subprocess.PIPE, cwd=ROOT)
    result = {'version': name, 'kind': kind, 'commit': commit.stdout.strip()}
    (WORK / name).mkdir(parents=True, exist_ok=True)
    with (WORK / f'{name}-{kind}.log').open('w') as log:
        version = Version(name, log)
        try:
            version.install()
            steps = {'library': version.library, 'random': version.random,
                     'all': version.everything}
            result |= steps[kind]()
            result['ok'] = result.get('quickstart', 'ok') == 'ok' and not any(
                result.get(f'{what}_failed') for what in ('random', 'cases', 'device', 'python'))
        except Failed as failure:
            result |= {'ok': False, 'fault': str(failure)}
    result['seconds'] = round(time.monotonic() - start)
    if not keep:
        shutil.rmtree(WORK / name)
    return result


def counts_of(result, what):
    if f'{what}_passed' not in result:
        return 'not run'
    return ', '.join(f'{result[f"{what}_{how}"]} {how}' for how in ('passed', 'failed', 'skipped')
                     if f'{what}_{how}' in result)


def table(results):
    yield ('| LibTorch | library, quickstart | random programs | cases | stand-in for a device '
           '| Python package | commit | |')
    yield '|---|---|---|---|---|---|---|---|'
    for each in results:
        first = 'fails' if 'library' not in each else each.get('quickstart', 'builds')
        counts = ' | '.join(counts_of(each, what)
                            for what in ('random', 'cases', 'device', 'python'))
        last = f'{each.get("commit", "")} | {each.get("fault", "")}'
        yield f'| {each["version"]} | {first} | {counts} | {last} |'


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('versions', nargs='*', metavar='VERSION', default=VERSIONS)
    parser.add_argument('--library', action='store_true', help='the library and one program only')
    parser.add_argument('--random', action='store_true', help='these, and random programs')
    parser.add_argument('--again', action='store_true', help='also what is done already')
    parser.add_argument('--keep', action='store_true',
                        help='leave environment and build folder there')
    given = parser.parse_args()
    kind = 'random' if given.random else 'library' if given.library else 'all'
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / 'results.jsonl'
    known = {}
    if path.exists():
        for line in path.read_text().splitlines():
            result = json.loads(line)
            known[result['version'], result['kind']] = result
    for name in given.versions:
        if (name, kind) in known and not given.again:
            continue
        print(f'== LibTorch {name}', file=sys.stderr, flush=True)
        known[name, kind] = result = run(name, kind, given.keep)
        with path.open('a') as file:
            file.write(json.dumps(result) + '\n')
        print(f'   {json.dumps(result)}', file=sys.stderr, flush=True)
    shown = [known[name, kind] for name in given.versions]
    print('\n'.join(table(shown)))
    return not all(each['ok'] for each in shown)


if __name__ == '__main__':
    sys.exit(main())
