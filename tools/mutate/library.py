"""The library with faults: a copy of the sources with every mutated place written as a choice,
built beside the real one."""

import collections
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess

import places

MAX_PLACES = 1 << 16
ROOT = pathlib.Path(__file__).resolve().parents[2]

HEADER = '''#pragma once
// Which fault is chosen, and which places were reached. Included before every source.
#include <atomic>
#include <iterator>
namespace remat::mutation {
extern int chosen;
extern std::atomic<unsigned char> reached[];
inline bool is(int place, int mutation) {
  reached[place].store(1, std::memory_order_relaxed);
  return chosen == mutation;
}
}  // namespace remat::mutation
'''

SOURCE = '''// Reads the environment once, when the library is loaded.
// Tests call the exported function after each case.
#include <cstdio>
#include <cstdlib>
namespace remat::mutation {
constinit int chosen = 0;
constinit std::atomic<unsigned char> reached[%(places)d] = {};
namespace {
std::FILE* trace = nullptr;
__attribute__((constructor(101))) void read_environment() {
  if (const char* const number = std::getenv("REMAT_MUTANT")) chosen = std::atoi(number);
  if (const char* const path = std::getenv("REMAT_MUTANT_TRACE")) trace = std::fopen(path, "a");
}
}  // namespace
}  // namespace remat::mutation
extern "C" __attribute__((visibility("default"))) void remat_mutation_case_ended(const char* name,
                                                                                 double seconds) {
  using namespace remat::mutation;
  if (trace == nullptr) return;
  // Reports of a sanitizer before this line belong to this case.
  std::fprintf(stderr, "case ended: %%s\\n", name);
  std::fprintf(trace, "%%s\\t%%f\\t", name, seconds);
  for (int place = 0; place < %(places)d; ++place)
    if (reached[place].exchange(0, std::memory_order_relaxed) != 0)
      std::fprintf(trace, "%%d ", place);
  std::fprintf(trace, "\\n");
  std::fflush(trace);
}
'''


def free_number(identity, below, taken):
    """One that depends on the identity, and above 0."""
    number = int(identity, 16) % (below - 1) + 1
    while number in taken:
        number = number % (below - 1) + 1
    taken.add(number)
    return number


def write_if_other(path, text):
    """Unchanged files keep their time, and the compiler's cache its hits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


class Library:
    """`kind` is 'faults' or 'locks'. Builds in FOLDER what the build folder's own library is built
    of."""

    def __init__(self, build, kind):
        self.build = build
        self.kind = kind
        self.folder = build / 'mutants' / kind
        self.tree = self.folder / 'tree'
        self.refused_path = self.folder / 'refused.json'    # what does not compile, by id
        self.places = []

    def sources(self):
        return sorted(path for folder in ('lib', 'hooks') for path in (ROOT / folder).rglob('*')
                      if path.suffix in ('.cpp', '.h'))

    def plant(self):
        """Writes the copy."""
        refused = set(json.loads(self.refused_path.read_text())) if self.refused_path.exists(
            ) else set()
        self.places, places_taken, mutations_taken = [], set(), set()
        for path in self.sources():
            name = str(path.relative_to(ROOT))
            text = path.read_text()
            found = places.places_of(name, text,
                                     self.kind) if name != 'lib/base/planted_fault.h' else []
            for place in found:
                # Numbers that other sources, and what does not compile, leave alone: so an edit
                # recompiles one unit only.
                place.number = free_number(place.mutations[0].id, MAX_PLACES, places_taken)
                for mutation in place.mutations:
                    mutation.number = free_number(mutation.id, 1 << 28, mutations_taken)
                place.mutations = [each for each in place.mutations if each.id not in refused]
            found = [place for place in found if place.mutations]
            self.places += found
            for place in reversed(found):
                text = text[:place.begin] + places.planted(place, text) + text[place.end:]
            write_if_other(self.tree / name, text)
        for unit in (self.build / 'lib').glob('*.cpp'):
            write_if_other(self.tree / 'units' / unit.name, unit.read_text())
        write_if_other(self.tree / 'mutation.h', HEADER)
        write_if_other(self.tree / 'units' / 'mutation.cpp', SOURCE % {'places': MAX_PLACES})

    def commands(self):
        """(compile commands by source, link command) of the build folder's own library."""
        ninja = os.environ.get('NINJA', 'ninja')
        target = (self.build / 'lib/libremat.so').resolve().relative_to(self.build.resolve())
        lines = subprocess.run([ninja, '-C', self.build, '-t', 'commands', target], check=True,
                               text=True,
                               stdout=subprocess.PIPE).stdout.splitlines()
        compiles = {}
        link = None
        for line in lines:
            words = shlex.split(line)
            if '-c' in words:
                compiles[words[words.index('-c') + 1]] = words
            elif '-shared' in words:
                link = words
        return compiles, link

    def more_flags(self):
        flags = ['-O0', '-w', '-fdiagnostics-color=never', '-include',
                 str(self.tree / 'mutation.h')]
        return flags + ['-fsanitize=thread', '-g1'] if self.kind == 'locks' else flags

    def compile(self, words, source, target=None):
        """The compiler's words about errors; '' if there are none. Without a target it only
        looks."""
        before = words[:words.index('-MD')] if '-MD' in words else words[:words.index('-o')]
        at = 1 + max(i for i, word in enumerate(before)
                     if re.search(r'(\+\+|cc|clang)[\d.-]*$', word) and not word.startswith('-'))
        command = [*before[:at], f'-I{self.tree}', *before[at:], *self.more_flags(), '-c',
                   str(source)]
        command += ['-o', str(target), '-MMD', '-MF',
                    str(target)[:-1] + 'd'] if target else ['-fsyntax-only']
        if not target and command[0] == 'ccache':
            command.pop(0)
        done = subprocess.run(command, cwd=self.build, text=True, stderr=subprocess.PIPE)
        return done.stderr if done.returncode else ''

    def refuse(self, words):
        """Notes what stands on the lines that the compiler complains of; whether there was
        anything."""
        at_line = collections.defaultdict(list)
        for place in self.places:
            last = place.line + (ROOT / place.path).read_text()[place.begin:place.end].count('\n')
            for line in range(place.line, last + 1):
                at_line[place.path, line].append(place)
        bad = set()
        for path, line in re.findall(rf'^{re.escape(str(self.tree))}/([\w/.]+):(\d+):\d+: error',
                                     words, re.M):
            bad |= {each.id for place in at_line[path, int(line)] for each in place.mutations}
        known = set(json.loads(self.refused_path.read_text())) if self.refused_path.exists(
            ) else set()
        self.refused_path.write_text(json.dumps(sorted(known | bad), indent=0))
        return bad

    def make(self, say):
        """Plants and builds until all that is left compiles; returns the folder of libremat.so."""
        compiles, link = self.commands()
        self.folder.mkdir(parents=True, exist_ok=True)
        objects = self.folder / 'objects'
        objects.mkdir(exist_ok=True)
        self.plant()
        units = {}
        for source, words in [*compiles.items(), ('mutation.cpp', next(iter(compiles.values())))]:
            path = self.tree / 'units' / pathlib.Path(source).name
            units[path if path.exists()
                  else self.tree / (self.build / source).resolve().relative_to(ROOT)] = words
        built = []
        for path, words in units.items():
            built.append(str(objects / f'{path.name}.o'))
            if self.is_made(path):
                continue
            say(f'looking what of {path.name} compiles')
            while errors := self.compile(words, path):
                refused = self.refuse(errors)
                if not refused:
                    raise SystemExit(
                        f'mutate: {path.name} does not compile, and no place is to blame:\n'
                        f'{errors[:4000]}')
                say(f'{path.name}: {len(refused)} mutations do not compile')
                self.plant()
        for (path, words), target in zip(units.items(), built):
            if self.is_made(path):
                continue
            say(f'compiling {path.name}')
            errors = self.compile(words, path, target)
            if errors:
                raise SystemExit(f'mutate: {path.name} does not compile:\n{errors[:4000]}')
            (objects / f'{path.name}.stamp').write_text(self.digest(path))
        out = self.folder / 'lib'
        out.mkdir(exist_ok=True)
        soname = next(word.split(',')[-1] for word in link if word.startswith('-Wl,-soname'))
        command, skip = [], False
        for word in link:
            if skip:
                skip = False
            elif word == '-o':
                skip = True
            elif not word.endswith('.o'):
                command.append(word)
        at = next(i for i, word in enumerate(command) if word.startswith('-Wl,')
                  or word == '-shared')
        command[at:at] = ['-o', str(out / soname), *built]
        if self.kind == 'locks':
            command = [word for word in command
                       if word != '-Wl,--no-undefined'] + ['-fsanitize=thread']
        made = out / soname
        if not made.exists() or made.stat().st_mtime < max(pathlib.Path(each).stat().st_mtime
                                                           for each in built):
            subprocess.run(command, cwd=self.build, check=True)
        (self.folder / 'places.txt').write_text(''.join(
            f'{m.number}\t{p.number}\t{m.id}\t{p.path}:{p.line}\t{m.rule}\t{p.original}\t{m.text}\n'
            for p in self.places for m in p.mutations))
        return out

    def is_made(self, unit):
        stamp = self.folder / 'objects' / f'{unit.name}.stamp'
        return stamp.exists() and stamp.read_text() == self.digest(unit)

    def digest(self, unit):
        """Of all that a unit was made of when it was compiled last, as it is now; '' if it never
        was."""
        made_of = self.folder / 'objects' / f'{unit.name}.d'
        if not made_of.exists():
            return ''
        whole = hashlib.sha1()
        for path in made_of.read_text().replace('\\\n', ' ').split()[1:]:
            path = (self.build / path).resolve()
            if path.is_relative_to(ROOT):
                whole.update(path.read_bytes() if path.exists() else b'')
        return whole.hexdigest()
