#!/usr/bin/env python3
"""Runs torch's own tests of checkpoints and hooks twice, without remat and with it installed, and
compares.

    python/tests/upstream.py [--sources FOLDER] [SUITE...]

FOLDER holds a PyTorch source tree with its `test/`. Without it, one is taken from Debian's source
package of pytorch, where apt knows a mirror, into build/upstream-tests; nothing of it becomes part
of this tree. Their tests may be of another release than the torch that is installed: some fail
then, and must fail alike with remat.

Prints a table, and each test that does not end the same; the exit status says whether there is one.
Their tests need expecttest, numpy and pytest beside torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
CACHE = TREE / "build" / "upstream-tests"
RELEASE = "trixie"  # Debian's, with a pytorch near enough

# The suites, by name: (file below test/, the choice of its tests).
SUITES = {
    "checkpoint": ("test_autograd.py", "checkpoint"),
    "hooks": ("test_autograd.py", "hook or saved or checkpoint"),
    "utils": ("test_utils.py", "checkpoint"),
    "composable": ("distributed/_composable/test_checkpoint.py", ""),
    "wrapper": ("distributed/fsdp/test_checkpoint_wrapper.py", ""),
    "dynamo": ("dynamo/test_activation_checkpointing.py", ""),
}

# Imports of other releases' tests that this torch lacks; none of the tests above uses them.
GONE = {
    "torch.testing._internal.inductor_utils": {"HAS_CUDA": False},
    "torch.autograd._functions.utils": {"check_onnx_broadcast": None},
}

# The program of the child: pytest on one file, then a line with remat's counts.
RUN = """
import json, sys
with_remat, gone, arguments = json.loads(sys.argv[1])
import importlib
for module, names in gone.items():
    module = importlib.import_module(module)
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)
if with_remat:
    import remat
    remat.install()
import pytest
status = pytest.main(arguments)
if with_remat:
    print("REMAT", json.dumps(remat.counters()))
"""


def mirror() -> tuple[str, str]:
    """Returns a Debian mirror and the options of its line, as this machine's apt knows them."""
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if not path.is_file():
            continue
        text = path.read_text()
        for line in text.splitlines():
            found = re.match(r"deb\s+(\[[^]]*\]\s+)?(\S+/debian/?)\s+\S+\s+.*\bmain\b", line)
            if found:
                return found[2], found[1] or ""
        for stanza in re.split(r"\n\s*\n", text):
            fields = dict(re.findall(r"^([A-Za-z-]+):\s*(.*)$", stanza, re.MULTILINE))
            if re.search(r"/debian/?$", fields.get("URIs", "")):
                key = fields.get("Signed-By")
                return fields["URIs"].split()[0], f"[signed-by={key}] " if key else ""
    sys.exit(
        "upstream.py: apt knows no Debian mirror here. Hint: name a PyTorch source tree with "
        "--sources."
    )


def fetch() -> Path:
    """Returns the source package's tree; fetched once."""
    tree = CACHE / "pytorch"
    if (tree / "test").is_dir():
        return tree
    url, options = mirror()
    for folder in ("lists/partial", "cache/archives/partial"):
        (CACHE / folder).mkdir(parents=True, exist_ok=True)
    (CACHE / "sources.list").write_text(f"deb-src {options}{url} {RELEASE} main\n")
    settings = [
        *("-o", f"Dir::Etc::sourcelist={CACHE}/sources.list", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", f"Dir::State::lists={CACHE}/lists", "-o", f"Dir::Cache={CACHE}/cache"),
    ]
    subprocess.run(["apt-get", "-q", *settings, "update"], cwd=CACHE, check=True)
    subprocess.run(
        ["apt-get", "-q", *settings, "source", "--download-only", "pytorch"], cwd=CACHE, check=True
    )
    archive = next(CACHE.glob("pytorch_*.orig.tar.*"))
    tree.mkdir()
    command = ["tar", "-xf", archive, "-C", tree, "--strip-components=1", "--wildcards", "*/test/*"]
    subprocess.run(command, check=True)
    return tree


def ends_of(report: Path) -> dict[str, str]:
    """Returns {test: its end} from the output of pytest; empty if there is none."""
    ends: dict[str, str] = {}
    if report.exists():
        for case in xml.parse(report).iter("testcase"):
            children = {each.tag for each in case}
            end = (
                "failed"
                if children & {"failure", "error"}
                else "skipped"
                if "skipped" in children
                else "passed"
            )
            ends[f"{case.get('classname')}.{case.get('name')}"] = end
    return ends


def run(
    sources: Path, suite: str, with_remat: bool, timeout_s: int
) -> tuple[dict[str, str], dict[str, int], str]:
    """Returns ({test: its end}, remat's counters, the output's end)."""
    file, chosen = SUITES[suite]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        arguments = [
            str(sources / "test" / file), "-q", "--noconftest", "-c", os.devnull, "-p",
            "no:cacheprovider"
        ]
        arguments += [
            "--rootdir", str(sources / "test"), f"--junitxml={report}", "--tb=line", "-W", "ignore"
        ]
        if chosen:
            arguments += ["-k", chosen]
        path = os.pathsep.join(
            map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
        )
        child = subprocess.run(
            [sys.executable, "-c", RUN, json.dumps([with_remat, GONE, arguments])],
            cwd=sources / "test", env=os.environ | {"CI": "", "PYTHONPATH": path}, text=True,
            timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        ends = ends_of(report)
    counters: dict[str, int] = {}
    for line in child.stdout.splitlines():
        if line.startswith("REMAT "):
            counters = json.loads(line[6:])
    return ends, counters, child.stdout[-3000:]


def count(ends: dict[str, str]) -> str:
    return " / ".join(
        str(sum(end == kind for end in ends.values())) for kind in ("passed", "failed", "skipped")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sources", type=Path, help="a PyTorch source tree")
    parser.add_argument("--timeout", type=int, default=1800, help="of one suite [s]")
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all if none is named"
    )
    options = parser.parse_args()
    unknown = set(options.suites) - set(SUITES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    lacking = [
        name for name in ("expecttest", "numpy", "pytest") if importlib.util.find_spec(name) is None
    ]
    if lacking:
        parser.error(
            f"torch's tests need what is not installed here. Hint: pip install {' '.join(lacking)}"
        )
    sources = (options.sources or fetch()).resolve()
    print(f"{'suite':12} {'without: pass/fail/skip':26} {'with remat':18} regions opened")
    different = 0
    for suite in options.suites or SUITES:
        plain, _, output = run(sources, suite, False, options.timeout)
        ours, counters, our_output = run(sources, suite, True, options.timeout)
        print(
            f"{suite:12} {count(plain):26} {count(ours):18} "
            f"{counters.get('frames_created', 'died')}",
            flush=True,
        )
        if not plain:
            print(output)
        if not ours:
            print(our_output)
        for test in sorted(plain.keys() | ours.keys()):
            before, after = plain.get(test, "missing"), ours.get(test, "missing")
            if before != after:
                different += 1
                print(f"  {before} -> {after}: {test}")
        if not plain:
            print(f"{suite}: no test ran without remat either, which shows nothing")
        different += not plain or not ours
    print("the same" if different == 0 else f"{different} different")
    return 0 if different == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
