"""Lays figures out as text, each beside its bar and verdict. It measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.stats import Verdict

HEADINGS = ("figure", "torchft_ckpt", "torchft 0.2.0", "bar", "verdict")
NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: a name, what was measured on both sides (text with its unit), its bar, and the verdict."""

    figure: str
    ours: str
    reference: str = ""
    bar: str = ""
    verdict: Verdict = Verdict.NO_BAR


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One benchmark's rows, the notes that a reader needs to judge them, and the raw figures behind them."""

    name: str
    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    raw: dict[str, Any] = field(default_factory=dict)


def seconds(value: float | None) -> str:
    """Write a duration with the unit that suits it; 'not run' for None."""
    if value is None:
        return NOT_RUN
    if value < 0.1:
        return f"{value * 1000:.2f} ms" if value < 0.01 else f"{value * 1000:.1f} ms"
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def ratio(value: float | None) -> str:
    """Write a ratio, or 'not run' for None."""
    return NOT_RUN if value is None else f"{value:.3f}x"


def render(sections: Sequence[Section], reference: str = HEADINGS[2]) -> str:
    """Lay all sections out in one set of columns, each with its title above and its notes below.

    Args:
        sections: in order.
        reference: what is compared with.
    """
    headings = (*HEADINGS[:2], reference, *HEADINGS[3:])
    rows = [row for section in sections for row in section.rows]
    cells = [headings, *((r.figure, r.ours, r.reference, r.bar, r.verdict.value) for r in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]

    def line(values: Sequence[str]) -> str:
        return "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)).rstrip()

    out = [line(headings), "  ".join("-" * width for width in widths)]
    for section in sections:
        out += ["", section.title]
        out += [line((r.figure, r.ours, r.reference, r.bar, r.verdict.value)) for r in section.rows]
        out += [f"  note: {note}" for note in section.notes]
    met = sum(row.verdict is Verdict.MET for row in rows)
    missed = [row.figure.strip() for row in rows if row.verdict is Verdict.MISSED]
    out += ["", f"bars met: {met}, missed: {len(missed)}" + (f" ({'; '.join(missed)})" if missed else "")]
    return "\n".join(out)


def to_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Return everything that the table says, and the raw figures, as plain values for `json.dump`."""
    return {
        section.name: {
            "title": section.title,
            "rows": [{**asdict(row), "verdict": row.verdict.value} for row in section.rows],
            "notes": list(section.notes),
            "raw": section.raw,
        }
        for section in sections
    }
