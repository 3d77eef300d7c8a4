"""The section of a figure of the outer loop's benchmark that cannot be measured here."""

from __future__ import annotations

from bench.stats import Verdict
from bench.table import Row, Section


def skipped(name: str, title: str, figure: str, bar: str, error: Exception) -> Section:
    """Return the section of a figure that cannot be measured here."""
    row = Row(figure=f"  {figure}", ours="SKIPPED", bar=bar, verdict=Verdict.NOT_RUN)
    return Section(name=name, title=title, rows=[row], notes=[f"SKIPPED: {error}"])
