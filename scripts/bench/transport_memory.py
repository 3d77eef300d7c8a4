"""How much memory a process used at most above where it began. Linux: the kernel keeps the peak, nothing is sampled."""

from __future__ import annotations

from pathlib import Path

_RESET_PEAK = "5"


class PeakMemory:
    """Begins to watch when made.

    Raises:
        OSError: this system does not let a process reset its own peak.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        self._before_bytes = _read_status("VmRSS")

    def growth_bytes(self) -> int:
        """Return the largest resident size since the beginning, less the one at the beginning."""
        return _read_status("VmHWM") - self._before_bytes


def _read_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
