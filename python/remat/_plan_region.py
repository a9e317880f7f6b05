"""A region of a plan; apart from _plan.py, which needs the extension, whose types need this."""

from __future__ import annotations

from typing import NamedTuple


class PlanRegion(NamedTuple):
    """Stages `first` to `last`, which run as one region."""

    first: int
    """From 1."""
    last: int
    """Inclusive."""
