"""`python -m torchft_ckpt`, for processes that a nursery forks."""

from __future__ import annotations

import sys

from torchft_ckpt.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
