"""The paths of modules and parameters, by which policies choose."""

from __future__ import annotations

import torch.nn as nn

from ._arguments import checked
from ._extension import _remat


@checked
def register_tree(root: nn.Module) -> None:
    """Registers a tree of modules, so that policies know the paths of its modules and parameters,
    as `named_modules()` has them: "layers.0.attention".

    Without it, a policy that first asks about a module registers the tree of the outermost module
    that runs then. Call this where the program calls the parts of its model and not the model
    itself, and again if modules or parameters were added or replaced. No module is kept alive.
    Threads: any; no other thread may change the tree meanwhile.
    """
    _remat._register_tree(root)
