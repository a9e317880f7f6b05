"""What builds the Python package: meson-python, except that the metadata are there before anything is compiled.

meson-python leaves that step out. Then pip compiles all to learn the metadata, and shows "Preparing metadata" for as long.
"""
from __future__ import annotations

import os
import pathlib
import sysconfig
from typing import Any

import pyproject_metadata
from mesonpy import (  # noqa: F401
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

try:
    import tomllib
except ImportError:  # before Python 3.11
    import tomli as tomllib  # type: ignore[import-not-found, no-redef]

# Meson and the other tools are found where pip has installed them, too, in an environment that is not activated.
os.environ['PATH'] = os.pathsep.join([os.environ.get('PATH', os.defpath), sysconfig.get_path('scripts')])


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    with open('pyproject.toml', 'rb') as file:
        metadata = pyproject_metadata.StandardMetadata.from_pyproject(tomllib.load(file), pathlib.Path.cwd())
    folder = pathlib.Path(metadata_directory, f'{metadata.name}-{metadata.version}.dist-info')
    folder.mkdir()
    (folder / 'METADATA').write_bytes(bytes(metadata.as_rfc822()))
    return folder.name
