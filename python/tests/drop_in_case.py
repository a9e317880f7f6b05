"""The shared case of the drop-in's tests: remat is installed for each, and its regions are
counted."""

from __future__ import annotations

import functools

from torch.utils.checkpoint import checkpoint

import remat
from common import Case

region = functools.partial(checkpoint, use_reentrant=False)


class DropIn(Case):
    def setUp(self) -> None:
        super().setUp()
        remat.install()
        self.before = remat.counters()["frames_created"]

    def tearDown(self) -> None:
        remat.uninstall()
        super().tearDown()

    def num_regions(self) -> int:
        return remat.counters()["frames_created"] - self.before
