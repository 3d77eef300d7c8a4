"""`python examples/demo ...` runs the demo; `python examples/demo worker ...` is one of its replica groups."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run by its path: make the folder importable as the package `demo`, and nothing else from here
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from demo.worker import main
    else:
        from demo.cli import main
    sys.exit(main(sys.argv[2:] if sys.argv[1:2] == ["worker"] else sys.argv[1:]))
