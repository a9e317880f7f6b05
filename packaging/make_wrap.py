#!/usr/bin/env python3
"""make_wrap.py ARCHIVE [URL]: prints the wrap file of a release, in the form that Meson's wrap
database wants.

ARCHIVE is what `meson dist --no-tests` or `git archive` has made: one folder named remat-VERSION.
URL is where it can be fetched; without one the archive is expected in subprojects/packagefiles.
"""
import hashlib
import pathlib
import sys
import tarfile


def main():
    archive = pathlib.Path(sys.argv[1])
    url = sys.argv[2] if len(sys.argv) > 2 else ''
    with tarfile.open(archive) as tar:
        folders = {name.split('/')[0] for name in tar.getnames()}
    if len(folders) != 1:
        sys.exit(f'{archive} holds {len(folders)} folders, and not one named remat-VERSION')
    print('[wrap-file]')
    print(f'directory = {folders.pop()}')
    if url:
        print(f'source_url = {url}')
    print(f'source_filename = {archive.name}')
    print(f'source_hash = {hashlib.sha256(archive.read_bytes()).hexdigest()}')
    print('\n[provide]\nremat = remat_dep')


if __name__ == '__main__':
    main()
