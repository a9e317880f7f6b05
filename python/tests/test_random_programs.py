"""Random programs, and the search for a wrong one."""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import unittest
from unittest import mock

import torch

import random_programs
import remat
from common import Case
from random_programs import Operation, Program, Region


class RandomPrograms(Case):
    def setUp(self) -> None:
        # Another test may have imported it: then policy functions run in upstream's modes, which
        # allow one backward.
        name = "torch.nn.attention.flex_attention"
        if (module := sys.modules.pop(name, None)) is not None:
            self.addCleanup(sys.modules.__setitem__, name, module)

    def test_regions_change_no_gradient(self) -> None:
        count = int(os.environ.get("REMAT_RANDOM_PROGRAMS", "500"))
        before = remat.counters()["frames_created"]
        self.assertEqual(list(random_programs.findings(range(count))), [])
        self.assertGreater(remat.counters()["frames_created"] - before, count)

    def test_everything_is_drawn(self) -> None:
        drawn: collections.Counter[object] = collections.Counter()
        for seed in range(500):
            program = random_programs.program_of(seed)
            drawn[program.backward] += 1
            drawn["guard", program.guard] += 1
            blocks = [program.block]
            for region in random_programs._regions(program.block):
                drawn[region.call] += 1
                drawn["policy", region.policy] += 1
                blocks.append(region.block)
            drawn.update(
                each.name for block in blocks for each in block if isinstance(each, Operation)
            )
        wanted = [*random_programs.OPERATIONS, *random_programs.CALLS, *random_programs.BACKWARDS]
        wanted += [("guard", each) for each in random_programs.GUARDS]
        wanted += [("policy", each) for each in random_programs.POLICIES]
        self.assertEqual([each for each in wanted if drawn[each] < 5], [])

    def test_a_wrong_gradient_is_found_and_made_small(self) -> None:
        def wrong(x: torch.Tensor, w: torch.Tensor, run: random_programs.Run) -> torch.Tensor:
            return x.sin() * (1 + (remat.is_recomputing() and run.way == "own"))

        inner = Region(
            [Operation("mul", 0), Operation("wrong", 0), Operation("exp", 1)], policy="names"
        )
        program = Program(
            [Operation("sin", 0), Region([inner], call="keyword")], backward="grad", guard="cpu"
        )
        with (
            mock.patch.dict(random_programs.OPERATIONS, wrong=wrong),
            tempfile.TemporaryDirectory() as folder,
        ):
            self.assertRegex(random_programs.difference(program, 1, folder), "^own: ")
            found = random_programs.smallest(program, 1, folder)
        (region,) = found.block
        self.assertIn("wrong", [each.name for each in region.block])
        self.assertLess(len(region.block), 3)
        self.assertEqual((found.backward, found.guard, region.policy), ("backward", None, None))


if __name__ == "__main__":
    unittest.main()
