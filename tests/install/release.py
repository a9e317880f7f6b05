#!/usr/bin/env python3
"""release.py TORCH_ROOT: installs the files of dist/ in fresh environments, as a user would, and runs programs with them.

Environments see the torch of this interpreter and fetch nothing but the tools that build a wheel. Run by
`./dev release --check` after `./dev release`. The last line printed is `N passed, N failed`.
"""

import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build/release-check"
TREE = ROOT / "build/release/tree"    # the clone that dist/ was made of
TORCH = Path(sys.argv[1])
TOOLS = ROOT / "build/release/environment"    # of packaging/release.py, with meson-python

DROP_IN = """
import torch
from torch.utils.checkpoint import checkpoint
import remat

torch.manual_seed(0)
model = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4))
x = torch.randn(8, 16)

def gradients(call):
    y = x
    for block in model:
        y = call(block, y)
    return torch.autograd.grad(y.sum(), list(model.parameters()))

plain = gradients(lambda block, y: block(y))
with remat.installed():
    before = remat.counters()["recomputes"]
    regions = gradients(lambda block, y: checkpoint(block, y, use_reentrant=False))
    assert remat.counters()["recomputes"] - before == 4, "the drop-in did not run"
assert all(map(torch.equal, plain, regions)), "gradients differ"
"""
STAND_IN = '__version__ = "1.0.0"\n'    # of another torch


def only(pattern):
    found = sorted(DIST.glob(pattern))
    if len(found) != 1:
        sys.exit(f"dist/ holds {len(found)} files {pattern}. Hint: type ./dev release first.")
    return found[0]


def run(*command, **more):
    print("+", *command, flush=True)
    return subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def call(*command, **more):
    done = run(*command, **more)
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


class Environment:
    """A fresh Python environment; it sees these folders, and no other package."""

    def __init__(self, name, *seen):
        self.folder = WORK / name
        shutil.rmtree(self.folder, ignore_errors=True)
        call(sys.executable, "-m", "venv", self.folder)
        self.python = self.folder / "bin/python"
        self.packages = Path(call(self.python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip())
        (self.packages / "seen.pth").write_text("".join(f"{each}\n" for each in seen))
        self.variables = {**os.environ, "PATH": f"{self.folder}/bin:{TOOLS}/bin:{os.environ['PATH']}"}
        self.variables.pop("PYTHONPATH", None)

    def pip(self, *words):
        return call(self.python, "-m", "pip", "--disable-pip-version-check", *words, env=self.variables, cwd=WORK)

    def runs(self, *words):
        return call(self.python, *words, env=self.variables, cwd=WORK)

    def works(self):
        """The quickstart and the drop-in, with the package that is installed; then it can be removed without a rest."""
        said = self.runs(ROOT / "python/examples/quickstart.py")
        assert "gradients bit-equal: yes" in said, said
        self.runs("-c", DROP_IN)
        self.runs("-m", "remat", ROOT / "python/examples/quickstart.py")
        self.pip("uninstall", "-y", "remat")
        left = [path for path in self.folder.rglob("*remat*")]
        assert not left, f"uninstalled, but there are still {left}"

    def refuses(self, words, *wanted):
        done = run(self.python, *words, env=self.variables, cwd=WORK)
        last = done.stdout.strip().splitlines()[-1]
        assert done.returncode and all(each in last for each in wanted), done.stdout


def site_of(python):
    return call(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))").strip()


def the_wheel():
    environment = Environment("wheel", TORCH.parent)
    environment.pip("install", only("*.whl"))
    environment.works()


def without_torch():
    environment = Environment("no-torch")
    environment.pip("install", "--no-deps", only("*.whl"))
    environment.refuses(["-c", "import remat"], "no torch is installed", "Hint: pip install 'torch>=")


def with_another_torch():
    fake = WORK / "another"
    (fake / "torch").mkdir(parents=True, exist_ok=True)
    (fake / "torch/__init__.py").write_text(STAND_IN)
    environment = Environment("another-torch", fake)
    environment.pip("install", "--no-deps", only("*.whl"))
    environment.refuses(["-c", "import remat"], "torch 1.0.0 is installed", "Hint: pip install 'torch>=")


def building_without_torch():
    environment = Environment("build-no-torch", site_of(TOOLS / "bin/python"))
    (environment.packages / "seen.pth").write_text("")    # torch.pth of the tools is none of this environment's
    done = run(TOOLS / "bin/python", "-I", "-S", TREE / "tools/find_torch.py", "--python", environment.python,
               env={**environment.variables, "TORCH_ROOT": ""})
    assert done.returncode and "Hint: install torch there" in done.stdout, done.stdout


def the_sdist():
    environment = Environment("sdist", TORCH.parent, site_of(TOOLS / "bin/python"))
    environment.pip("install", "--no-build-isolation", only("*.tar.gz"))
    environment.works()


def an_editable_tree():
    environment = Environment("editable", TORCH.parent, site_of(TOOLS / "bin/python"))
    environment.pip("install", "--no-build-isolation", f"-Cbuild-dir={TREE}/build-editable", "-e", TREE)
    environment.works()


def the_binary_archive():
    print(call(sys.executable, HERE / "run.py", TREE, WORK, TORCH, only("*-libtorch*.tar.xz")), flush=True)


def fetch_content():
    build = WORK / "fetch"
    call("cmake", "-G", "Ninja", "-S", HERE / "fetch", "-B", build, f"-DREMAT={TREE}", "-DTAG=HEAD", f"-DTORCH_ROOT={TORCH}",
         f"-DQUICKSTART={TREE}/examples/quickstart.cpp", f"-DCMAKE_CXX_COMPILER={os.environ.get('CXX', 'g++').split()[-1]}")
    call("cmake", "--build", build)
    said = call(build / "quickstart")
    assert said == (TREE / "examples/quickstart.expected").read_text(), said


def checksums():
    call("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=DIST)


def main():
    WORK.mkdir(parents=True, exist_ok=True)
    passed = failed = 0
    for check in (checksums, the_wheel, without_torch, with_another_torch, building_without_torch, the_binary_archive, the_sdist,
                  an_editable_tree, fetch_content):
        if sys.argv[2:] and check.__name__ not in sys.argv[2:]:
            continue
        try:
            check()
        except (AssertionError, RuntimeError, OSError):
            traceback.print_exc(limit=1, file=sys.stdout)
            print(f"FAILED: {check.__name__}", flush=True)
            failed += 1
        else:
            print(f"ok: {check.__name__}", flush=True)
            passed += 1
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
