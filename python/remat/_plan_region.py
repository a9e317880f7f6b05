"""A region of a plan; apart from _plan.py, whose extension needs this type."""

from __future__ import annotations

from typing import NamedTuple


class PlanRegion(NamedTuple):
    """Stages `first` to `last`, which run as one region."""

    first: int
    """The first stage, counted from 1."""
    last: int
    """The last stage, inclusive."""
