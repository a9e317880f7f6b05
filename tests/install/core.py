#!/usr/bin/env python3
"""core.py SOURCE_ROOT BUILD_ROOT TORCH_ROOT: builds and installs the core alone, and a consumer's
program against it."""
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

SOURCE, BUILD, TORCH = map(pathlib.Path, sys.argv[1:])
WORK = BUILD / 'install-core'
MESON = shlex.split(os.environ.get('MESON', 'meson'))


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


if __name__ == '__main__':
    main()
