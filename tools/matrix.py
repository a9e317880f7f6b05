#!/usr/bin/env python3
"""matrix.py [--library] [--again] [--keep] [VERSION...]: builds and tests the tree on many LibTorch, one after the other.

Each version is installed from the package index into an environment of its own under build/matrix, with what its wheel
needs to load (up to 6 GB), which is deleted when the version is done. Builds the library, the Catch2 cases and the Python
package and runs them; with --library the library and examples/quickstart.cpp alone. What is done stands in
build/matrix/results.jsonl and is not done again. The last thing printed is a table.
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / 'build' / 'matrix'
VERSIONS = ('2.6.0', '2.7.1', '2.8.0', '2.9.1', '2.10.0', '2.11.0', '2.12.1', '2.13.0', '2.14.1', '2.15.0')
JOBS = os.environ.get('JOBS', str(os.cpu_count()))


class Failed(Exception):
    """A step did not go through: its name, with the compiler's or program's first words about it."""


class Version:
    def __init__(self, name, log):
        self.name, self.log = name, log
        self.folder = WORK / name
        self.environment = self.folder / 'environment'
        self.build = self.folder / 'build'
        self.python = self.environment / 'bin' / 'python'
        # Its python3 comes first: the build takes the torch of that one.
        self.variables = dict(os.environ, PATH=f'{self.environment}/bin:{os.environ["PATH"]}', OMP_WAIT_POLICY='passive')
        self.variables.pop('TORCH_ROOT', None)

    def call(self, step, *command, check=True, **more):
        self.log.write('+ ' + ' '.join(map(str, command)) + '\n')
        self.log.flush()
        done = subprocess.run(list(map(str, command)), text=True, errors='replace', stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env={**self.variables, **more}, cwd=ROOT)
        self.log.write(done.stdout)
        self.log.flush()
        if check and done.returncode != 0:
            words = re.search(r'^.*(?:\berror\b|ERROR|Error).*$', done.stdout, re.M)
            raise Failed(f'{step}: {words[0].strip()[:300] if words else "status " + str(done.returncode)}')
        return done

    def install(self):
        if not self.python.exists():
            self.call('environment', sys.executable, '-m', 'venv', self.environment)
        self.call('install', self.python, '-m', 'pip', 'install', '--disable-pip-version-check', '-q', f'torch=={self.name}',
                  'numpy', 'setuptools', *(() if shutil.which('ninja') else ('ninja',)))
        self.root = self.call('torch', self.python, '-I', '-c',
                              'import importlib.util, os; print(os.path.dirname(importlib.util.find_spec("torch").origin))'
                              ).stdout.strip()

    def configure(self, *options):
        how = ['--wipe'] if (self.build / 'meson-private').exists() else []
        self.call('configure', os.environ.get('MESON', 'meson'), 'setup', *how, self.build, f'-Dtorch_root={self.root}',
                  '-Dbench=disabled', *options)

    def compile(self, *targets):
        done = self.call('build', 'ninja', '-C', self.build, '-j', JOBS, *targets)
        return len(re.findall(r'^\.\./.*warning: ', done.stdout, re.M))

    def library(self):
        self.configure('-Dtests=disabled', '-Dexamples=enabled', '-Dpython=disabled')
        warnings = self.compile('examples/quickstart')
        fits = self.call('quickstart', sys.executable, ROOT / 'tools/compare_output.py', ROOT / 'examples/quickstart.expected',
                         self.build / 'examples/quickstart', check=False)
        return {'library': 'builds', 'quickstart': 'ok' if fits.returncode == 0 else fits.stdout[-300:], 'warnings': warnings}

    def everything(self):
        self.configure('-Dtests=enabled', '-Dexamples=disabled', '-Dpython=auto')
        result = {'library': 'builds', 'warnings': self.compile('tests/cases')}
        run = self.call('cases', self.build / 'tests/cases', '-r', 'compact', check=False)
        listed = self.call('cases', self.build / 'tests/cases', '--list-test-names-only', check=False)
        cases = len([line for line in listed.stdout.splitlines() if line.strip()])
        bad = re.search(r'Failed (?:both )?(\d+)? ?(?:test cases?|both)', run.stdout)
        result['failing'] = sorted(set(re.findall(r'^(\S+\.cpp:\d+): failed', run.stdout, re.M)))[:40]
        if run.returncode < 0 or (run.returncode and not bad):
            result |= {'cases_passed': 0, 'cases_failed': cases, 'ended': run.returncode}
        else:
            failed = int(bad[1] or cases) if bad else 0
            result |= {'cases_passed': cases - failed, 'cases_failed': failed}
        try:
            self.compile('python-package')
            run = self.call('python', self.python, '-W', 'ignore', '-m', 'unittest', 'discover', '-s', 'python/tests', '-t',
                            'python/tests', check=False, PYTHONPATH=f'{self.build}/python:python/tests')
            ran = re.search(r'^Ran (\d+) tests', run.stdout, re.M)
            ran = int(ran[1]) if ran else 0
            bad = sum(map(int, re.findall(r'(?:failures|errors)=(\d+)', run.stdout)))
            result |= {'python_passed': ran - bad, 'python_failed': bad if ran else 1,
                       'python_failing': re.findall(r'^(?:FAIL|ERROR): (\S+)', run.stdout, re.M)[:40]}
        except Failed as failure:
            result |= {'python_passed': 0, 'python_failed': 1, 'python_failing': [str(failure)]}
        return result


def run(name, kind, keep):
    start = time.monotonic()
    result = {'version': name, 'kind': kind}
    (WORK / name).mkdir(parents=True, exist_ok=True)
    with (WORK / f'{name}-{kind}.log').open('w') as log:
        version = Version(name, log)
        try:
            version.install()
            result |= version.library() if kind == 'library' else version.everything()
            result['ok'] = result.get('quickstart', 'ok') == 'ok' and not result.get('cases_failed') and not result.get('python_failed')
        except Failed as failure:
            result |= {'ok': False, 'fault': str(failure)}
    result['seconds'] = round(time.monotonic() - start)
    if not keep:
        shutil.rmtree(WORK / name)
    return result


def table(results):
    yield '| LibTorch | library, quickstart | cases | Python package | |'
    yield '|---|---|---|---|---|'
    for each in results:
        counts = [f'{each[f"{what}_passed"]} passed, {each[f"{what}_failed"]} failed' if f'{what}_passed' in each else 'not run'
                  for what in ('cases', 'python')]
        first = 'fails' if 'library' not in each else each.get('quickstart', 'builds')
        yield f'| {each["version"]} | {first} | {counts[0]} | {counts[1]} | {each.get("fault", "")} |'


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('versions', nargs='*', metavar='VERSION', default=VERSIONS)
    parser.add_argument('--library', action='store_true', help='the library and one program only')
    parser.add_argument('--again', action='store_true', help='also what is done already')
    parser.add_argument('--keep', action='store_true', help='leave environment and build folder there')
    given = parser.parse_args()
    kind = 'library' if given.library else 'all'
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
