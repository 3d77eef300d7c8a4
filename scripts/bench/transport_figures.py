"""Turns what the transport benchmark has recorded into figures. Numbers in, numbers and words out; it measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.stats import Verdict, median, pair_ratios

MIB = 1 << 20
GIB = 1 << 30
FRAME_HEADER_BYTES = 14 + 20 + 32
"""Of one packet on a virtual link: Ethernet, IPv4, TCP with timestamps."""


def judge_at_least(value: float | None, bar: float) -> Verdict:
    """Return whether a figure, where larger is better, keeps its bar."""
    if value is None:
        return Verdict.NOT_RUN
    return Verdict.MET if value >= bar else Verdict.MISSED


def best_setting(times: Mapping[int, Sequence[float]]) -> int | None:
    """Return the setting whose times have the smallest median, or None where nothing was measured."""
    medians = {setting: middle for setting, values in times.items() if (middle := median(values)) is not None}
    return min(medians, key=lambda setting: medians[setting], default=None)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Return the median of the ratios of neighbours; None where there are none."""
    return median(pair_ratios(numerators, denominators))


def spread(values: Sequence[float], unit: str = "x") -> str:
    """Write the smallest and the largest value, to be put beside a median."""
    return f"{min(values):.2f} to {max(values):.2f}{unit}" if values else ""


def payload_bytes(received_bytes: int, received_packets: int) -> int:
    """Return how many bytes of TCP payload came in over a link, from the counters of its interface.

    Each packet that the kernel handed over, merged ones too, has one set of headers. What is no TCP (a few ARP packets)
    and the options of the first packets make it wrong by less than a KiB.
    """
    return received_bytes - received_packets * FRAME_HEADER_BYTES


def deal(items: Sequence[int], num_hands: int) -> list[list[int]]:
    """Deal items round robin, as many to each hand as can be."""
    return [list(items[hand::num_hands]) for hand in range(num_hands)]


def mebibytes(value: float | None) -> str:
    """Write a number of bytes in MiB, or 'not run' for None."""
    return "not run" if value is None else f"{value / MIB:.1f} MiB"


def rate(num_bytes: int, seconds: float | None) -> str:
    """Write bytes a second in GB/s (10^9), or MB/s where that is small; 'not run' for None."""
    if not seconds:
        return "not run"
    per_s = num_bytes / seconds
    return f"{per_s / 1e9:.2f} GB/s" if per_s >= 1e9 else f"{per_s / 1e6:.0f} MB/s"
