"""The process group is connected on another thread than the one that trains, and for the device of the one that trains."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.replicas import lighthouse_of, manager_of

from torchft_ckpt.process_group import ProcessGroupDummy

LIMIT = timedelta(seconds=30)


class DeviceNotingGroup(ProcessGroupDummy):
    """Notes the current device of the thread that connects it."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.seen: list[tuple[bool, int]] = []

    def configure(self, *arguments: Any, **options: Any) -> None:
        is_training_thread = threading.current_thread() is threading.main_thread()
        self.seen.append((is_training_thread, torch.cuda.current_device()))
        super().configure(*arguments, **options)


def test_the_group_is_connected_for_the_device_that_is_current_in_the_training_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with CUDA, each thread begins with device 0; there are no GPUs here."""
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    torch.cuda.set_device(3)

    group = DeviceNotingGroup()
    manager = manager_of(lighthouse_of(1), lambda state: None, dict, pg=group)
    manager.start_quorum()
    manager.wait_quorum()
    assert group.seen == [(False, 3)]
