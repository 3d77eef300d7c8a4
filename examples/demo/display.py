"""Live progress: a table that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo.timeline import Life, Phase, Timeline

_PLAIN_INTERVAL_S = 5.0
_NUM_NOTES = 8
_STYLE = {
    Phase.STARTING: "yellow",
    Phase.JOINING: "cyan",
    Phase.TRAINING: "green",
    Phase.FINISHED: "bold green",
    Phase.DOWN: "bold red",
}


class Display:
    """Shows a run on a console; a context manager, because a terminal must be given back."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._notes: list[str] = []
        self._next_plain_s = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            for line in self._notes:
                self._console.print(line, highlight=False, markup=False)

    def note(self, timeline: Timeline, text: str) -> None:
        """Show a line that stays."""
        line = f"{time.monotonic() - timeline.started_s:6.1f} s  {text}"
        self._notes.append(line)
        if self._live is None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def refresh(self, timeline: Timeline) -> None:
        """Redraw; without a terminal, print one line every few seconds."""
        if self._live is not None:
            self._live.update(self._draw(timeline), refresh=True)
        elif time.monotonic() >= self._next_plain_s:
            self._next_plain_s = time.monotonic() + _PLAIN_INTERVAL_S
            lives = [timeline.life_of(group) for group in range(timeline.num_groups)]
            text = "   ".join(
                [progress(timeline, self._num_steps), *(describe(life) for life in lives if life is not None)]
            )
            self._console.print(
                f"{time.monotonic() - timeline.started_s:6.1f} s  {text}", highlight=False, markup=False, soft_wrap=True
            )

    def _draw(self, timeline: Timeline) -> RenderableType:
        table = Table(expand=False)
        for heading in ("group", "life", "state", "step", "loss", "quorum", "groups in it", "discarded"):
            table.add_column(heading, justify="left" if heading in ("group", "state") else "right")
        for group in range(timeline.num_groups):
            life = timeline.life_of(group)
            if life is None:
                continue
            last = life.steps[-1] if life.steps else None
            discarded = sum(not step.committed for one in timeline.lives_of(group) for step in one.steps)
            table.add_row(
                f"group_{group}",
                str(life.number + 1),
                Text(life.phase.value, style=_STYLE[life.phase]),
                str(last.step) if last else "",
                _loss(life),
                str(last.quorum_id) if last else "",
                str(last.participants) if last else "",
                str(discarded),
            )
        elapsed_s = time.monotonic() - timeline.started_s
        num_kills = len(timeline.kills)
        kills = f"{num_kills} kill{'' if num_kills == 1 else 's'}"
        head = Text(f"{progress(timeline, self._num_steps)}, {kills}, {elapsed_s:.0f} s")
        bar = ProgressBar(total=self._num_steps, completed=min(timeline.newest_step, self._num_steps), width=40)
        below = Table.grid(padding=(0, 1))
        below.add_row(bar, head)
        return Group(table, below, Text("\n".join(self._notes[-_NUM_NOTES:]), style="dim"))


def progress(timeline: Timeline, num_steps: int) -> str:
    """How far the run is, and how long it may still take."""
    newest, left_s = timeline.newest_step, timeline.left_s(num_steps)
    if not newest:
        return "starting torch" if timeline.is_starting else "making the first step"
    left = "ending" if newest >= num_steps else "" if left_s is None else f"{left_s:.0f} s left"
    return f"step {newest} of {num_steps}{', ' if left else ''}{left}"


def describe(life: Life) -> str:
    """One group in a few words."""
    loss = _loss(life) if life.phase is Phase.TRAINING else ""
    return f"group_{life.group} {life.phase.value}{loss and f' loss={loss}'}"


def _loss(life: Life) -> str:
    loss = life.steps[-1].loss if life.steps else None
    return "" if loss is None else f"{loss:.3f}"
