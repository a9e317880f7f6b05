"""Puts a method in front of torch's engine object, so that open regions see the backwards that
Python begins."""

from __future__ import annotations

from typing import Any

from torch._C import _ImperativeEngine
from torch.autograd import Variable


def put_in_front(extension: Any) -> None:
    """Once for the process, at import. Outside of regions a backward costs one call more."""
    extension._set_names(engine_run_backward=Variable._execution_engine.run_backward)

    class Engine(_ImperativeEngine):
        run_backward = staticmethod(extension._run_backward)

    Variable._execution_engine = Engine()
