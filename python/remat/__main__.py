"""`python -m remat SCRIPT ARGUMENT...` or `python -m remat -m MODULE ARGUMENT...`: runs it with remat installed, in the
processes, too, that it starts by multiprocessing. `torchrun -m remat SCRIPT ARGUMENT...` runs each rank so."""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(__doc__, file=sys.stderr)
        sys.exit(0 if arguments and arguments[0] != "-m" else 2)
    from ._drop_in import install, install_in_children

    install()
    install_in_children()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = ""
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        import os

        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
