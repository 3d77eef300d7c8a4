"""What a transfer tells about itself, and the bar that shows it."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest

from torchft_ckpt.checkpointing.progress import ProgressBar, ProgressCallback, TransferProgress, tell, together

MIB = 2**20
BEGINNING = TransferProgress(
    step=41, total_bytes=8 * MIB, received_bytes=0, skipped_bytes=0, resent_bytes=0, num_sources=2, elapsed_s=0.0
)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")


class Terminal(io.StringIO):
    """A file that says that it is a terminal, so that every change may be drawn."""

    def isatty(self) -> bool:
        return True

    def bars(self) -> list[str]:
        """Each bar that was drawn, as it was left."""
        return [line.split("\r")[-1] for line in self.getvalue().split("\n") if line]


def drawn(*told: TransferProgress) -> list[str]:
    terminal = Terminal()
    bar = ProgressBar(terminal)
    for progress in told:
        bar(progress)
    return terminal.bars()


@pytest.mark.parametrize(
    ("progress", "fraction", "bytes_per_s"),
    [
        (BEGINNING, 0.0, 0.0),
        (replace(BEGINNING, received_bytes=2 * MIB, elapsed_s=0.5), 0.25, 4 * MIB),
        (replace(BEGINNING, received_bytes=2 * MIB, skipped_bytes=4 * MIB, elapsed_s=2.0), 0.75, MIB),
        (replace(BEGINNING, received_bytes=8 * MIB, resent_bytes=MIB, elapsed_s=1.0), 1.0, 8 * MIB),
        (replace(BEGINNING, total_bytes=0), 1.0, 0.0),
    ],
)
def test_skipped_bytes_are_done_but_say_nothing_about_the_rate(
    progress: TransferProgress, fraction: float, bytes_per_s: float
) -> None:
    assert (progress.fraction, progress.bytes_per_s) == (fraction, bytes_per_s)


def test_a_callback_that_raises_is_logged_once_and_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    told: list[TransferProgress] = []

    def raises_at_the_second(progress: TransferProgress) -> None:
        told.append(progress)
        if len(told) == 2:
            raise ValueError("of the test")

    callback: ProgressCallback | None = raises_at_the_second
    for _ in range(4):
        callback = tell(callback, BEGINNING)
    assert (callback, len(told)) == (None, 2)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_several_callbacks_are_told_together_and_one_that_raises_does_not_end_the_others() -> None:
    told: list[str] = []

    def raises(progress: TransferProgress) -> None:
        told.append("raises")
        raise ValueError("of the test")

    def counts(progress: TransferProgress) -> None:
        told.append("counts")

    assert together(None, None) is None and together(None, counts) is counts
    callback = together(raises, None, counts)
    assert callback is not None
    callback(BEGINNING)
    callback(BEGINNING)
    assert told == ["raises", "counts", "counts"]


def test_a_transfer_is_one_bar_that_closes_itself() -> None:
    (bar,) = drawn(
        BEGINNING,
        replace(BEGINNING, received_bytes=4 * MIB, elapsed_s=1.0),
        replace(BEGINNING, received_bytes=8 * MIB, elapsed_s=2.0),
    )
    assert bar.startswith("step 41: 100%")
    assert "8.00M/8.00M" in bar
    assert "2 sources" in bar


def test_the_end_told_twice_is_drawn_once() -> None:
    end = replace(BEGINNING, received_bytes=8 * MIB, elapsed_s=2.0)
    assert len(drawn(BEGINNING, end, end)) == 1


def test_the_rate_is_that_of_the_whole_transfer_however_late_the_bar_appears() -> None:
    (bar,) = drawn(replace(BEGINNING, received_bytes=8 * MIB, elapsed_s=4000.0, num_sources=1))
    assert "[1:06:40<00:00, 2.10kiB/s, 1 source]" in bar


def test_another_step_gets_another_bar() -> None:
    first, second = drawn(
        BEGINNING,
        replace(BEGINNING, received_bytes=8 * MIB),
        replace(BEGINNING, step=42),
        replace(BEGINNING, step=42, received_bytes=8 * MIB),
    )
    assert first.startswith("step 41: 100%")
    assert second.startswith("step 42: 100%")


def test_a_transfer_that_begins_again_gets_another_bar() -> None:
    first, second = drawn(
        replace(BEGINNING, received_bytes=4 * MIB), BEGINNING, replace(BEGINNING, received_bytes=8 * MIB)
    )
    assert first.startswith("step 41:  50%")
    assert second.startswith("step 41: 100%")


def test_a_transfer_that_fails_leaves_its_bar_where_it_was() -> None:
    terminal = Terminal()
    with pytest.raises(RuntimeError), ProgressBar(terminal) as bar:
        bar(replace(BEGINNING, received_bytes=2 * MIB))
        raise RuntimeError("the transfer failed")
    bar.close()
    assert [line[:12] for line in terminal.bars()] == ["step 41:  25"]


def test_bytes_that_were_sent_again_are_shown() -> None:
    (bar,) = drawn(replace(BEGINNING, received_bytes=8 * MIB, resent_bytes=3 * MIB, elapsed_s=1.0))
    assert "3M resent" in bar


def test_an_empty_state_is_a_whole_bar() -> None:
    assert len(drawn(replace(BEGINNING, total_bytes=0))) == 1


def test_a_log_file_gets_a_bar_at_the_beginning_and_at_the_end_of_a_quick_transfer() -> None:
    log = io.StringIO()
    bar = ProgressBar(log)
    for received in range(0, 8 * MIB + 1, MIB // 8):
        bar(replace(BEGINNING, received_bytes=received, elapsed_s=1.0))
    assert log.getvalue().count("\r") <= 3


def test_a_bar_starts_no_thread() -> None:
    before = threading.enumerate()
    ProgressBar(Terminal())(BEGINNING)
    assert threading.enumerate() == before


def test_threads_may_tell_at_once() -> None:
    terminal = Terminal()
    bar = ProgressBar(terminal)
    bar(BEGINNING)
    told = threading.Barrier(4)

    def tell() -> None:
        told.wait()
        for _ in range(50):
            bar(replace(BEGINNING, received_bytes=MIB))

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bar(replace(BEGINNING, received_bytes=8 * MIB))
    assert [line[:12] for line in terminal.bars()] == ["step 41: 100"]
