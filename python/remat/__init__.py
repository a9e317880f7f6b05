"""Activation checkpointing: what autograd would save is computed again in backward.

Two ways in. `remat.checkpoint(function, *args)` runs one call as a region. `remat.install()` puts remat under
`torch.utils.checkpoint`, for programs that are written already.

    loss = remat.checkpoint(block, x, name="block 3").sum()
    loss.backward()

Threads: everything here may be called from any thread; a guard is the affair of the thread that entered it.
"""

from __future__ import annotations

from ._extension import _remat  # first: it says what is wrong if the extension does not fit
from ._errors import CheckpointError, ErrorKind, Mismatch
from ._region import Checkpointing, checkpoint, checkpointed
from ._policy import (
    CheckpointPolicy,
    Policy,
    PolicyContext,
    checkpoint_name,
    offload_names,
    offload_ops,
    pin,
    save_all_but_names,
    save_matmuls,
    save_names,
    save_ops,
)
from ._drop_in import install, installed, is_installed, uninstall

counters = _remat.counters
is_checkpointing = _remat.is_checkpointing
is_recomputing = _remat.is_recomputing

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointPolicy",
    "Checkpointing",
    "ErrorKind",
    "Mismatch",
    "Policy",
    "PolicyContext",
    "checkpoint",
    "checkpoint_name",
    "checkpointed",
    "counters",
    "install",
    "installed",
    "is_checkpointing",
    "is_installed",
    "is_recomputing",
    "offload_names",
    "offload_ops",
    "pin",
    "save_all_but_names",
    "save_matmuls",
    "save_names",
    "save_ops",
    "uninstall",
]
