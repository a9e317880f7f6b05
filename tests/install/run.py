#!/usr/bin/env python3
"""run.py SOURCE_ROOT BUILD_ROOT TORCH_ROOT: builds examples/quickstart.cpp the three ways a user may.

As a Meson subproject, against an installed remat through pkg-config, and through CMake. Each program must print
what examples/quickstart.expected says. The work folder stays in the build folder, so that a second run has
little to do. The last line printed is `N passed, N failed`.
"""
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOURCE, BUILD, TORCH = map(pathlib.Path, sys.argv[1:4])
sys.path.append(str(SOURCE / 'tools'))
from compare_output import differs  # noqa: E402

WORK = BUILD / 'install-test'
STAGE = WORK / 'stage'
QUICKSTART = SOURCE / 'examples/quickstart.cpp'
MESON = shlex.split(os.environ.get('MESON', 'meson'))
JOBS = os.environ.get('JOBS', str(os.cpu_count()))


def call(*command, **more):
    print('+', *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, **more)


def output_of(*command, **more):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, **more).stdout


def find_in_stage(name):
    """The folder of an installed file: prefix and library folder are the user's choice."""
    found = next(STAGE.rglob(name), None)
    if found is None:
        raise FileNotFoundError(f'{name} was not installed')
    return found.parent


def as_subproject():
    project = WORK / 'subproject'
    (project / 'subprojects').mkdir(parents=True, exist_ok=True)
    shutil.copy2(HERE / 'subproject/meson.build', project)
    shutil.copy2(QUICKSTART, project)
    link = project / 'subprojects/remat'
    if not link.is_symlink():
        link.symlink_to(SOURCE)
    build = project / 'build'
    if not (build / 'build.ninja').exists():
        # Unoptimised: whether it builds is the question, and the library is large.
        call(*MESON, 'setup', build, project, f'-Dremat:torch_root={TORCH}', '-Doptimization=0')
    call('ninja', '-C', build, '-j', JOBS, 'quickstart')
    return build / 'quickstart'


def through_pkg_config():
    program = WORK / 'quickstart-pkg-config'
    environment = dict(os.environ, PKG_CONFIG_PATH=str(find_in_stage('remat.pc')))
    flags = output_of('pkg-config', '--cflags', '--libs', 'remat', env=environment).split()
    rpath = f'-Wl,-rpath,{find_in_stage("libremat.so")}'
    call(*compiler(), '-std=c++20', QUICKSTART, *flags, rpath, '-o', program)
    return program


def through_cmake():
    build = WORK / 'cmake'
    call('cmake', '-G', 'Ninja', '-S', HERE / 'cmake', '-B', build, f'-Dremat_DIR={find_in_stage("rematConfig.cmake")}',
         f'-DQUICKSTART={QUICKSTART}', f'-DCMAKE_CXX_COMPILER={compiler()[-1]}')
    call('cmake', '--build', build, '--parallel', JOBS)
    return build / 'quickstart'


def compiler():
    return shlex.split(os.environ.get('CXX', 'g++'))


def main():
    shutil.rmtree(STAGE, ignore_errors=True)
    call(*MESON, 'install', '-C', BUILD, '--no-rebuild', '--quiet', env=dict(os.environ, DESTDIR=str(STAGE)))
    passed = failed = 0
    for way in (as_subproject, through_pkg_config, through_cmake):
        name = way.__name__.replace('_', ' ')
        tool = {through_pkg_config: 'pkg-config', through_cmake: 'cmake'}.get(way)
        if tool and not shutil.which(tool):
            print(f'{name}: skipped, there is no {tool} here')
            continue
        try:
            fault = differs(QUICKSTART.with_suffix('.expected'), [str(way())])
        except (OSError, subprocess.CalledProcessError) as error:
            fault = f'{error}\n'
        print(f'{name}: {fault or "ok"}')
        passed, failed = passed + (not fault), failed + bool(fault)
    print(f'{passed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
