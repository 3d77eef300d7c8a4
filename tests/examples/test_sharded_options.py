"""The command line of examples/train_hsdp.py and examples/train_fsdp.py."""

from __future__ import annotations

import pytest
from sharded.options import parse


def test_a_script_that_is_started_by_itself_says_what_starts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["train_hsdp.py"])

    with pytest.raises(SystemExit):
        parse("")

    assert "start it by `python -m torchft_ckpt run --groups 2 --nproc 2 -- train_hsdp.py`" in capsys.readouterr().err
