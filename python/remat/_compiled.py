"""`checkpoint` under the tracing of torch.compile or a strict export: a region of upstream."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Optional

import torch
import torch.utils.checkpoint as upstream

from ._region import checkpoint

# Options that choose what is kept, or where it waits. Traced regions have them with these values
# only.
_PLAIN = {"policy": None, "fingerprint": None, "offload_inputs": False, "input_mode": "shared",
          "level": None, "value_comparison": None, "handle": None}  # fmt: skip
# Options that a traced region does not need.
_CHECKS = ("name", "determinism_check", "capture_check", "offload_prefetch_depth", "buffers",
           "modules", "strict_unpack", "debug", "prepare_ahead", "transforms")  # fmt: skip


def _traced(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Replaces `checkpoint` in torch._dynamo's traces. Breaks the graph for other options."""
    for name, value in _PLAIN.items():
        if kwargs.pop(name, value) != value:
            torch._dynamo.graph_break(
                msg=f"remat.checkpoint: torch.compile cannot trace a region with {name}"
            )
    for name in _CHECKS:
        kwargs.pop(name, None)
    return upstream.checkpoint(function, *args, use_reentrant=False, **kwargs)


def register() -> None:
    """Registers the substitute with torch._dynamo, which is already imported."""
    substitute: Any = torch.compiler.substitute_in_graph
    substitute(checkpoint, skip_signature_check=True)(_traced)


class _Registering(Loader):
    """A loader that loads torch._dynamo, and then registers the substitute."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        register()


class _WhenImported(MetaPathFinder):
    """A finder that waits for torch._dynamo: its import takes seconds, and many programs never do
    it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Optional[ModuleSpec]:
        if fullname != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


def register_when_imported() -> None:
    """Calls `register` now, or when torch._dynamo is imported."""
    if not hasattr(torch.compiler, "substitute_in_graph"):  # before 2.6
        return
    if "torch._dynamo" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _WhenImported())
