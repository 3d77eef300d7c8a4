"""The listeners of examples/event_loggers.py, with loggers that keep what they get."""

from __future__ import annotations

from event_loggers import to_tensorboard, to_wandb

from torchft_ckpt.events import PeerLost, StepCommitted

COMMITTED = StepCommitted(step=7, quorum_id=2, replica_id="g", num_participants=3, took_s=0.25)
LOST = PeerLost(step=7, quorum_id=2, replica_id="g", peer="h", reason="its connection closed")


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, *point: object) -> None:
        self.scalars.append(point)  # type: ignore[arg-type]

    def add_text(self, *text: object) -> None:
        self.texts.append(text)  # type: ignore[arg-type]


class Run:
    def __init__(self) -> None:
        self.logged: dict[str, object] = {}

    def log(self, values: dict[str, object]) -> None:
        self.logged |= values


def test_tensorboard_gets_curves_of_committed_steps_and_texts_of_all_else() -> None:
    on_event = to_tensorboard(writer := Writer())
    on_event(COMMITTED)
    on_event(LOST)
    assert writer.scalars == [("StepCommitted/took_s", 0.25, 7), ("StepCommitted/num_participants", 3, 7)]
    assert writer.texts == [("PeerLost", str(LOST), 7)]


def test_weights_and_biases_gets_each_field_under_its_events_name() -> None:
    on_event = to_wandb(run := Run())
    on_event(COMMITTED)
    on_event(LOST)
    assert run.logged["StepCommitted/took_s"] == 0.25
    assert run.logged["PeerLost/peer"] == "h"
