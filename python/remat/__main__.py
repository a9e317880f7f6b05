"""`python -m remat SCRIPT ARGUMENT...` or `python -m remat -m MODULE ARGUMENT...` runs a program
with remat installed, also in the processes that it starts by multiprocessing. `torchrun -m remat
SCRIPT ARGUMENT...` runs each rank in this way.

`python -m remat --budget TEXT SCRIPT ARGUMENT...` also runs it within a byte budget: the main
thread of each such process runs inside `remat.budget(TEXT)`, with TEXT such as 8GiB or 500MB.

`python -m remat --report ...` writes at its end how the calls of torch.utils.checkpoint ran: the
one line of `remat.served()`.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import pkgutil
import runpy
import sys
import types
from typing import Any

_run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls


def _become_main() -> types.ModuleType:
    """Installs a new `__main__`. It remains after the program has ended, since threads and `atexit`
    functions of the program may read it."""
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __doc__=None)
    sys.modules["__main__"] = module
    return module


def _run_script(path: str) -> None:
    main = _become_main()
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a program in it
        sys.path[0] = path
        _run_module("__main__", alter_argv=False)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    loader: Any = importlib.machinery.SourceFileLoader("__main__", path)
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        code = loader.source_to_code(loader.get_data(path), path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, vars(main))


def main() -> None:
    arguments = sys.argv[1:]
    budget = None
    report = arguments[:1] == ["--report"]
    del arguments[: int(report)]
    if arguments and arguments[0].split("=")[0] == "--budget":
        _, is_joined, budget = arguments.pop(0).partition("=")
        if not is_joined:
            budget = arguments.pop(0) if arguments else ""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(__doc__, file=sys.stderr)
        sys.exit(0 if arguments and arguments[0] != "-m" else 2)
    from ._drop_in import install, install_in_children

    try:
        install(budget=budget, report=report)
    except ValueError as error:
        if budget is None:
            raise
        sys.exit(f"python -m remat: {error}")
    install_in_children(budget)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = ""
        _become_main()
        _run_module(arguments[1], alter_argv=True)
    else:
        sys.argv = arguments
        _run_script(arguments[0])


if __name__ == "__main__":
    main()
