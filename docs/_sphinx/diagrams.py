"""Draws the diagrams of the pages as SVG: `scripts/diagrams`. That of a step is made from the table in the code, the others here.

Text is dark on a light card, or light on a dark one where the reader's pages are dark: so it can be read on both.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from pathlib import Path

from torchft_ckpt.core.coordination.replica import TRANSITIONS, StepEvent, StepPhase

FOLDER = Path(__file__).resolve().parents[1] / "diagrams"
_WIDTH, _BOX_WIDTH, _BOX_HEIGHT, _LINE = 900, 128, 46, 19
_LIGHT = {
    "ink": "#1f2937",
    "soft": "#4b5563",
    "line": "#64748b",
    "card": "#f8fafc",
    "box": "#e0e7ff",
    "edge": "#6366f1",
}
_DARK = {"ink": "#e5e7eb", "soft": "#a3adbb", "line": "#8b98a9", "card": "#1a1c20", "box": "#2a2d55", "edge": "#7f84f5"}


def step_diagram() -> str:
    """A step's life: the phases in a row, what leads from one to the other, and what changes nothing below."""
    phases = [phase.name for phase in StepPhase]
    drawing = _Drawing(362, "A step's life: the phases of one rank's step, and the events between them")
    gap = (_WIDTH - 80 - _BOX_WIDTH * len(phases)) / (len(phases) - 1)
    places = {phase: 40 + index * (_BOX_WIDTH + gap) for index, phase in enumerate(phases)}
    top = 190
    for phase, x in places.items():
        drawing.box(x, top, phase)
    between: dict[tuple[str, str], list[str]] = defaultdict(list)
    always: list[str] = []
    for event in StepEvent:
        leads = {phase.name: target.name for (phase, its), target in TRANSITIONS.items() if its is event}
        if leads.keys() == places.keys() and len(set(leads.values())) == 1:
            always.append(f"{event.value} leads to {leads['IDLE']} from every phase: a step that was open is given up.")
            # Where it begins a step it is drawn as well.
            leads = {phase: target for phase, target in leads.items() if phase == "IDLE" != target}
        for phase, target in leads.items():
            between[phase, target].append(event.value)
    for (phase, target), events in between.items():
        near, far = places[phase], places[target]
        if phase == target:
            drawing.text(near + _BOX_WIDTH / 2, top + _BOX_HEIGHT + 24, [f"↻ {event}" for event in events], "soft")
        elif phases.index(target) == phases.index(phase) + 1:
            drawing.arrow(near + _BOX_WIDTH, far, top + _BOX_HEIGHT / 2)
            drawing.text((near + _BOX_WIDTH + far) / 2, top + _BOX_HEIGHT / 2 - 9, events)
        else:
            steps = abs(phases.index(target) - phases.index(phase))
            # The longer an arc, the higher, and the further out it ends.
            end = far + _BOX_WIDTH / 2 + 34 - 22 * steps
            drawing.arc(near + _BOX_WIDTH / 2, end, top, 20 + 58 * steps, ", ".join(events))
    drawing.text(40, 326, always, "soft", anchor="start")
    return drawing.svg()


REPLICA = (
    ("starts", "a new process"),
    ("warms up", "computes alone"),
    ("held for", "gets the state"),
    ("healthy", "contributes, votes"),
)
REPLICA_FORWARD = (["the job runs"], ["its iteration", "ends"], ["has the state"])
REPLICA_ARCS = (
    (3, 2, 0, "left behind: it gets the state"),
    (0, 3, 1, "the job begins: all load one state before the first step"),
)
REPLICA_END = (
    "A group whose process ends is lost at once. The others discard one step at most, and its launcher starts it again."
)


def replica_diagram() -> str:
    """A replica group's life, from its start to its part in the job."""
    drawing = _Drawing(330, "A replica group's life: from its start to its part in the job")
    gap = (_WIDTH - 80 - 160 * len(REPLICA)) / (len(REPLICA) - 1)
    places = [40 + index * (160 + gap) for index in range(len(REPLICA))]
    top = 160
    for x, (name, what) in zip(places, REPLICA, strict=True):
        drawing.box(x, top, name, what, width=160, height=58)
    for index, label in enumerate(REPLICA_FORWARD):
        drawing.arrow(places[index] + 160, places[index + 1], top + 29)
        drawing.text((places[index] + 160 + places[index + 1]) / 2, top + 78, label, "soft")
    for near, far, level, label in REPLICA_ARCS:
        outwards = 40 * level
        drawing.arc(places[near] + 80 - outwards, places[far] + 80 + outwards, top, 50 + 95 * level, label)
    drawing.text(40, 298, [REPLICA_END], "soft", anchor="start")
    return drawing.svg()


def job_diagram() -> str:
    """A job: who talks to whom, while group 2 heals."""
    drawing = _Drawing(450, "A job: the lighthouse, three replica groups of two ranks, and who talks to whom")
    width, first_rank, between_ranks = 200, 205, 70
    places = [50, 350, 650]
    drawing.box(350, 24, "lighthouse", "members, quorums, votes", width=width, height=58)
    for place, name in zip(places, ("group 0", "group 1", "group 2, which heals"), strict=True):
        drawing.card(place, 165, name, width=width, height=198)
        drawing.path(f"M450 87 L{place + 100} {first_rank - 5}")
        for rank in (0, 1):
            drawing.box(place + 36, first_rank + between_ranks * rank, f"rank {rank}")
    drawing.text(620, 88, ["one connection", "from rank 0 of each group"], "soft", anchor="start")
    for left, right in itertools.pairwise(places):
        for rank in (0, 1):
            y = first_rank + between_ranks * rank + _BOX_HEIGHT / 2
            drawing.path(f"M{left + 36 + _BOX_WIDTH + 5} {y} H{right + 36 - 5}", is_two_way=True)
        drawing.label((left + right + width) / 2, first_rank + between_ranks - 10, "gradients")
    for place in places[:2]:
        drawing.path(f"M{place + 100} 367 C{place + 130} 423 {places[2] + 40} 423 {places[2] + 95} 369", is_dashed=True)
    drawing.label(450, 434, "weights over HTTP, from rank i to rank i: only while a group heals")
    return drawing.svg()


def _colours(of: dict[str, str]) -> str:
    return (
        f" .ground {{ fill: {of['card']} }} .box {{ fill: {of['box']}; stroke: {of['edge']} }}"
        f" .ink, .name {{ fill: {of['ink']} }} .label {{ fill: {of['ink']}; stroke: {of['card']} }}"
        f" .soft {{ fill: {of['soft']} }} .line, .card {{ stroke: {of['line']} }} .head {{ fill: {of['line']} }}"
    )


class _Drawing:
    def __init__(self, height: int, title: str) -> None:
        self._height = height
        self._title = title
        self._parts: list[str] = []
        self._labels: list[str] = []
        """Of arcs: drawn last, with a margin in the card's colour, as arcs cross them."""

    def box(
        self, x: float, y: float, name: str, what: str = "", *, width: float = _BOX_WIDTH, height: float = _BOX_HEIGHT
    ) -> None:
        self._parts.append(f'<rect x="{x:.0f}" y="{y}" width="{width}" height="{height}" rx="8" class="box"/>')
        middle = y + height / 2 + (5 if not what else -4)
        self._parts.append(f'<text x="{x + width / 2:.0f}" y="{middle:.0f}" class="name">{escape(name)}</text>')
        if what:
            self.text(x + width / 2, middle + 18, [what], "soft")

    def card(self, x: float, y: float, name: str, *, width: float, height: float) -> None:
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" class="card"/>')
        self._parts.append(f'<text x="{x + width / 2:.0f}" y="{y + height - 14}" class="name">{escape(name)}</text>')

    def path(self, points: str, *, is_two_way: bool = False, is_dashed: bool = False) -> None:
        more = (' marker-start="url(#head)"' if is_two_way else "") + (' stroke-dasharray="6 4"' if is_dashed else "")
        self._parts.append(f'<path d="{points}" class="line"{more}/>')

    def label(self, x: float, y: float, text: str) -> None:
        """Write a text over the lines that cross it."""
        self._labels.append(f'<text x="{x:.0f}" y="{y:.0f}" class="label">{escape(text)}</text>')

    def text(self, x: float, y: float, lines: Iterable[str], style: str = "ink", *, anchor: str = "middle") -> None:
        for index, line in enumerate(lines):
            self._parts.append(
                f'<text x="{x:.0f}" y="{y + index * _LINE:.0f}" class="{style}" text-anchor="{anchor}">{escape(line)}</text>'
            )

    def arrow(self, start: float, end: float, y: float) -> None:
        self._parts.append(f'<path d="M{start + 4:.0f} {y:.0f} H{end - 5:.0f}" class="line"/>')

    def arc(self, start: float, end: float, y: float, height: float, label: str) -> None:
        top = y - height
        self._parts.append(
            f'<path d="M{start:.0f} {y - 3:.0f} C{start:.0f} {top:.0f} {end:.0f} {top:.0f} {end:.0f} {y - 5:.0f}" class="line"/>'
        )
        self.label((start + end) / 2, y - height * 0.75 - 7, label)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self._height}" role="img"'
            f' font-family="system-ui, sans-serif" font-size="14">'
        )
        style = (
            " .name { font-weight: 600; text-anchor: middle }"
            " .label { text-anchor: middle; stroke-width: 6; paint-order: stroke }"
            " .card { fill: none }"
            " .line { fill: none; stroke-width: 1.5; marker-end: url(#head) }"
            f"{_colours(_LIGHT)} @media (prefers-color-scheme: dark) {{{_colours(_DARK)} }}"
        )
        marker = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">'
            '<path d="M0 0 L8 4 L0 8 z" class="head"/></marker>'
        )
        return "\n".join(
            [
                "<!-- Made by scripts/diagrams. -->",
                head,
                f"<title>{escape(self._title)}</title>",
                f"<style>{style}</style>",
                f"<defs>{marker}</defs>",
                f'<rect width="{_WIDTH}" height="{self._height}" rx="12" class="ground"/>',
                *self._parts,
                *self._labels,
                "</svg>",
                "",
            ]
        )


DIAGRAMS = {"step.svg": step_diagram, "replica.svg": replica_diagram, "job.svg": job_diagram}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (FOLDER / name).write_text(draw())
