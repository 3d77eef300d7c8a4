"""As `trainer_group.py`, and the save of step 10 takes 6 s."""

from __future__ import annotations

import time
from typing import Any

import trainer_group


class SlowLogger(trainer_group.Logger):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        if state.global_step == 10:
            time.sleep(6.0)
            self._write("saved", state.global_step)


if __name__ == "__main__":
    trainer_group.Logger = SlowLogger  # type: ignore[misc]
    trainer_group.main()
