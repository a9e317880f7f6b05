"""The examples run, and print the promised output."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import remat

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES.parents[1] / "tools"))
from compare_output import difference  # noqa: E402
# Stubtest's remarks about any class of pybind11; `Final` is how the stub says that a member can
# only be read.
OF_PYBIND = re.compile(
    r"metaclass differs|\.__init__ is inconsistent|is read-only at runtime but not in the stub"
)


def output_of(*command: str) -> str:
    """Returns the output of an example."""
    folder = os.path.dirname(os.path.dirname(remat.__file__))
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / command[0]), *command[1:]],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        text=True, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if done.returncode != 0:
        raise AssertionError(
            f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


class Examples(unittest.TestCase):
    def test_quickstart_prints_what_the_documents_show(self) -> None:
        self.assertEqual(
            output_of("quickstart.py"),
            "plain:        589828 bytes alive after forward\n"
            "checkpointed: 65540 bytes alive after forward\n"
            "gradients bit-equal: yes\n",
        )

    def test_tutorial_prints_what_the_documents_show(self) -> None:
        self.assertEqual(difference(EXAMPLES / "tutorial.expected", output_of("tutorial.py")), "")

    def test_tutorial_runs_single_steps(self) -> None:
        self.assertEqual(
            output_of("tutorial.py", "measure"), "measure\n  peak 21.77 MB, floor 1.80 MB\n"
        )

    def test_attention_rule(self) -> None:
        self.assertIn("first and second derivatives agree: yes", output_of("attention_rule.py"))

    def test_tour(self) -> None:
        text = output_of("tour.py")
        self.assertIn("region: 4 (Block)", text)
        self.assertIn("chosen for 300,000", text)

    def test_types(self) -> None:
        if importlib.util.find_spec("mypy") is None:
            self.skipTest("the package mypy is not installed")
        folder = os.path.dirname(os.path.dirname(remat.__file__))
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--cache-dir",
             os.devnull, "-p", "remat"],
            cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_the_stub_says_what_the_extension_has(self) -> None:
        if importlib.util.find_spec("mypy") is None:
            self.skipTest("the package mypy is not installed")
        done = subprocess.run(
            [sys.executable, "-m", "mypy.stubtest", "--concise", "remat._remat"],
            cwd=os.path.dirname(os.path.dirname(remat.__file__)),
            env={**os.environ, "MYPY_CACHE_DIR": os.devnull},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.assertIn("remat._remat.", done.stdout)
        self.assertEqual(
            [line for line in done.stdout.splitlines() if not OF_PYBIND.search(line)], []
        )

    def test_each_member_of_the_stub_is_there(self) -> None:
        stub = Path(remat.__file__).parent / "_remat.pyi"
        found = re.findall(r"^class (\w+)|^    (\w+): Final", stub.read_text(), re.MULTILINE)
        owner: object = None
        for name, member in found:
            owner = getattr(remat._remat, name) if name else owner
            self.assertTrue(not member or hasattr(owner, member), (owner, member))

    def test_gpt2(self) -> None:
        try:
            import transformers  # noqa: F401
        except ImportError:
            self.skipTest("the package transformers is not installed")
        text = output_of("gpt2.py", "--small", "--steps", "2", "--blocks", "6")
        self.assertIn("all trainings are equal, bit by bit", text)
        self.assertIn("the plan's peak is within its budget", text)


if __name__ == "__main__":
    unittest.main()
