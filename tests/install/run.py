#!/usr/bin/env python3
"""run.py SOURCE_ROOT BUILD_ROOT TORCH_ROOT [ARCHIVE]: builds examples/quickstart.cpp the ways a
user may.

As a Meson subproject, and against an installed remat through pkg-config and CMake. With a binary
archive of a release, against the unpacked archive: through pkg-config, CMake and Meson. Each
program must print what examples/quickstart.expected says. The work folder stays in the build
folder, so that a second run has little to do. The last line printed is `N passed, N failed`.
"""
import os
import pathlib
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SOURCE, BUILD, TORCH, *ARCHIVE = map(pathlib.Path, sys.argv[1:])
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
    call('cmake', '-G', 'Ninja', '-S', HERE / 'cmake', '-B', build,
         f'-Dremat_DIR={find_in_stage("rematConfig.cmake")}',
         f'-DQUICKSTART={QUICKSTART}', f'-DCMAKE_CXX_COMPILER={compiler()[-1]}',
         *([f'-DTORCH_ROOT={TORCH}'] if ARCHIVE else []))
    call('cmake', '--build', build, '--parallel', JOBS)
    return build / 'quickstart'


def through_meson():
    project = WORK / 'by-meson'
    project.mkdir(exist_ok=True)
    shutil.copy2(HERE / 'subproject/meson.build', project)
    shutil.copy2(QUICKSTART, project)
    shutil.rmtree(project / 'build', ignore_errors=True)
    call(*MESON, 'setup', project / 'build', project,
         f'-Dpkg_config_path={find_in_stage("remat.pc")}')
    call('ninja', '-C', project / 'build', '-j', JOBS)
    return project / 'build/quickstart'


SHIM = '''// Stands for another LibTorch: says of itself that it is one.
#include <string>
namespace at {
__attribute__((visibility("default"))) std::string show_config() {
  return "..., TORCH_VERSION=1.99.2, ...";
}
}  // namespace at
'''


def refuses_another_torch():
    """The output of a program run with a LibTorch that the library was not built for: empty if
    that is right."""
    source, shim = WORK / 'shim.cpp', WORK / 'shim.so'
    source.write_text(SHIM)
    flags = output_of('pkg-config', '--cflags', 'remat',
                      env=dict(os.environ, PKG_CONFIG_PATH=str(find_in_stage('remat.pc'))))
    call(*compiler(), '-std=c++20', '-shared', '-fPIC', source,
         *(word for word in flags.split() if word.startswith('-D')),
         '-o', shim)
    run = subprocess.run([WORK / 'quickstart-pkg-config'], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT,
                         env=dict(os.environ, LD_PRELOAD=str(shim)))
    wanted = 'but this process runs LibTorch 1.99.'
    is_said = run.returncode != 0 and wanted in run.stdout
    return '' if is_said else f'it did not say "{wanted}":\n{run.stdout}'


def refuses_other_headers():
    """CMake's fault where the folder of LibTorch has another one now: empty if that is right."""
    package = find_in_stage('rematConfig.cmake')
    other = WORK / 'other-torch'
    for folder in ('include/torch/csrc/api/include/torch', 'lib'):
        (other / folder).mkdir(parents=True, exist_ok=True)
    (other / 'include/torch/csrc/api/include/torch/version.h').write_text(
        '#define TORCH_VERSION_MAJOR 1\n'
        '#define TORCH_VERSION_MINOR 99\n'
        '#define TORCH_VERSION_PATCH 2\n')
    (other / 'lib/libtorch.so').touch()
    copy = WORK / 'other-package'
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(package, copy)
    text = (copy / 'rematConfig.cmake').read_text()
    (copy
     / 'rematConfig.cmake').write_text(re.sub(r'set\(_remat_torch_(root|libdir) .*\)', lambda found:
        f'set(_remat_torch_{found[1]} "{other}{"/lib" if found[1] == "libdir" else ""}")', text))
    run = subprocess.run(['cmake', '-G', 'Ninja', '-S', HERE / 'cmake', '-B', WORK / 'cmake-other',
                          f'-Dremat_DIR={copy}',
                          f'-DQUICKSTART={QUICKSTART}', f'-DCMAKE_CXX_COMPILER={compiler()[-1]}'],
                         text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wanted = 'this program uses 1.99.2'
    said = ' '.join(run.stdout.split())
    is_said = run.returncode != 0 and wanted in said
    return '' if is_said else f'it did not say "{wanted}":\n{run.stdout}'


def says_where_no_torch_is():
    """CMake's fault where the folder that the archive names does not exist: empty if that is
    right."""
    environment = {name: value for name, value in os.environ.items() if name != 'TORCH_ROOT'}
    run = subprocess.run(['cmake', '-G', 'Ninja', '-S', HERE / 'cmake', '-B', WORK / 'cmake-none',
                          f'-DQUICKSTART={QUICKSTART}',
                          f'-Dremat_DIR={find_in_stage("rematConfig.cmake")}',
                          f'-DCMAKE_CXX_COMPILER={compiler()[-1]}'], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    wanted = 'Hint: -DTORCH_ROOT=/folder'
    said = ' '.join(run.stdout.split())
    is_said = run.returncode != 0 and wanted in said
    return '' if is_said else f'it did not say "{wanted}":\n{run.stdout}'


def from_a_wrap():
    """A project that has the wrap file of a release finds remat: empty if it can be configured."""
    project = WORK / 'wrapped'
    shutil.rmtree(project, ignore_errors=True)
    (project / 'subprojects/packagefiles').mkdir(parents=True)
    shutil.copy2(HERE / 'subproject/meson.build', project)
    shutil.copy2(QUICKSTART, project)
    name = f'remat-{version()}'
    archive = project / f'subprojects/packagefiles/{name}.tar.xz'
    with tarfile.open(archive, 'w:xz', preset=0) as tar:
        for part in ('meson.build', 'meson_options.txt', 'LICENSE', 'README.md', 'CHANGELOG.md',
                     'docs', 'include', 'hooks', 'lib',
                     'packaging', 'python', 'tools', 'subprojects', 'examples'):
            tar.add(SOURCE / part, f'{name}/{part}',
                    filter=lambda each: None if '/.git' in each.name else each)
    (project / 'subprojects/remat.wrap').write_text(
        output_of(sys.executable, SOURCE / 'packaging/make_wrap.py', archive))
    call(*MESON, 'setup', project / 'build', project, f'-Dremat:torch_root={TORCH}',
         stdout=subprocess.DEVNULL)
    return ''


def has_papers():
    """Licence and documents come along."""
    missing = [name for name in ('LICENSE', 'README.md', 'CHANGELOG.md', 'guide.md')
               if not list(STAGE.rglob(name))]
    return f'not installed: {", ".join(missing)}' if missing else ''


def version():
    return re.search(r'REMAT_VERSION "(.*?)"', (SOURCE / 'include/remat/version.h').read_text())[1]


def compiler():
    return shlex.split(os.environ.get('CXX', 'g++'))


def unpack(archive):
    """As docs/installing.md says."""
    with tarfile.open(archive) as tar:
        tar.extractall(STAGE)
    facts = find_in_stage('remat.pc') / 'remat.pc'
    facts.write_text(
        re.sub(r'^torch_root=.*', f'torch_root={TORCH}', facts.read_text(), flags=re.M))


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    shutil.rmtree(STAGE, ignore_errors=True)
    ways = (as_subproject, through_pkg_config, through_cmake)
    checks = ((refuses_another_torch, 'pkg-config'), (refuses_other_headers, 'cmake'),
              (has_papers, ''), (from_a_wrap, ''))
    if ARCHIVE:
        unpack(*ARCHIVE)
        ways, checks = (through_pkg_config, through_cmake,
                        through_meson), (*checks[:3], (says_where_no_torch_is, 'cmake'))
    else:
        call(*MESON, 'install', '-C', BUILD, '--no-rebuild', '--quiet',
             env=dict(os.environ, DESTDIR=str(STAGE)))
    passed = failed = 0
    for way in ways:
        name = way.__name__.replace('_', ' ')
        tool = {through_pkg_config: 'pkg-config', through_cmake: 'cmake'}.get(way)
        if tool and not shutil.which(tool):
            print(f'{name}: skipped, there is no {tool} here')
            continue
        begin, cpu = time.monotonic(), cpu_seconds()
        try:
            fault = differs(QUICKSTART.with_suffix('.expected'), [str(way())])
        except (OSError, subprocess.CalledProcessError) as error:
            fault = f'{error}\n'
        used = f'{time.monotonic() - begin:.0f} s, {cpu_seconds() - cpu:.0f} s of CPU'
        print(f'{name}: {fault or f"ok ({used})"}')
        passed, failed = passed + (not fault), failed + bool(fault)
    for check, tool in checks:
        if tool and not shutil.which(tool):
            continue
        try:
            fault = check()
        except (OSError, subprocess.CalledProcessError) as error:
            fault = f'{error}\n'
        print(f'{check.__name__.replace("_", " ")}: {fault or "ok"}')
        passed, failed = passed + (not fault), failed + bool(fault)
    print(f'{passed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
