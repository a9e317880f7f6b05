#!/usr/bin/env python3
"""core.py SOURCE_ROOT BUILD_ROOT TORCH_ROOT: builds and installs the core alone, a consumer's
program against it, and the cases of Rules 1 to 14 that need no other layer.
"""
import concurrent.futures
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

SOURCE, BUILD, TORCH = map(pathlib.Path, sys.argv[1:])
WORK = BUILD / 'install-core'
MESON = shlex.split(os.environ.get('MESON', 'meson'))


# The cases of the Rules, compiled as a few sources. Those left out use policies, guards that
# move tensors, or lists of saved tensors.
RULES = [
    ['01_innermost_owns', '02_containers', '02_every_recompute', '02_inputs', '02_kept_alive',
     '03_clean_recompute'],
    ['04_release', '05_early_stop', '05_unsafe_stops', '06_several_backwards', '06_waiting_forward',
     '09_reading_twice'],
    ['07_one_recompute', '10_in_place', '10_mismatch', '10_state', '11_default_dtype', '11_modes'],
    ['11_threads', '12_failure', '13_depth', '13_lifetime', '14_once', '14_registrations'],
]


def call(*command, **more):
    print('+', *command, flush=True)
    return subprocess.run(list(map(str, command)), check=True, text=True, **more)


def main():
    stage = WORK / 'stage'
    shutil.rmtree(stage, ignore_errors=True)
    if not (WORK / 'build/build.ninja').exists():
        # Unoptimised: whether it links is the question.
        call(*MESON, 'setup', WORK / 'build', SOURCE, '-Donly_core=true', '-Doptimization=0',
             f'--prefix={stage}',
             f'-Dtorch_root={TORCH}')
    call(*MESON, 'install', '-C', WORK / 'build', '--quiet')
    [facts] = stage.rglob('remat.pc')
    environment = dict(os.environ, PKG_CONFIG_PATH=str(facts.parent))
    flags = call('pkg-config', '--cflags', '--libs', 'remat', env=environment,
                 stdout=subprocess.PIPE).stdout.split()
    [library] = stage.rglob('libremat.so')
    call(*shlex.split(os.environ.get('CXX', 'g++')), '-std=c++20',
         SOURCE / 'tests/install/core.cpp', *flags,
         f'-Wl,-rpath,{library.parent}', '-o', WORK / 'core')
    call(WORK / 'core')
    rules(flags, library.parent)


def rules(flags, place):
    """Compiles the cases of the Rules against the installed core, and runs them."""
    compiler = shlex.split(os.environ.get('CXX', 'g++'))
    sources = [SOURCE / 'tests/install/core_meter.cpp']
    sources += [SOURCE / f'tests/support/{name}.cpp' for name in ('main', 'support', 'operators')]
    for i, names in enumerate(RULES):
        sources.append(WORK / f'rules_{i}.cpp')
        sources[-1].write_text(''.join(f'#include "tests/rules/rule_{name}.cpp"\n'
                                       for name in names))

    def compiles(source):
        call(*compiler, '-std=c++20', '-O0', '-c', source, *flags, f'-I{SOURCE}',
             f'-I{SOURCE}/include', f'-I{TORCH}/include/torch/csrc/api/include',
             '-o', WORK / f'{source.stem}.o')
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compiles, sources))
    objects = [WORK / f'{source.stem}.o' for source in sources]
    call(*compiler, *objects, *flags, f'-Wl,-rpath,{place}', '-o', WORK / 'rules')
    call(WORK / 'rules')


if __name__ == '__main__':
    main()
