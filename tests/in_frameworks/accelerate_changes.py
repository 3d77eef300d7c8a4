"""What a user changes in a script for accelerate, line by line, and the script of a replica group that this makes of it."""

from __future__ import annotations

import difflib
from pathlib import Path

_IMPORTS = {
    "from accelerate import Accelerator": """\
from torchft_ckpt import Manager, ProcessGroupGloo
from torchft_ckpt.integrations.accelerate import FaultTolerantAccelerator"""
}
_MANAGER = "    manager = Manager(ProcessGroupGloo(), None, None, min_replica_size=1, replica_id=options.name)\n"
DIFFUSERS = {
    **_IMPORTS,
    "    accelerator = Accelerator(": f"{_MANAGER}    accelerator = FaultTolerantAccelerator(manager,",
    "    ema_model = Average(list(model.parameters()))": """\
    ema_model = Average(list(model.parameters()))
    accelerator.register_for_checkpointing(ema_model)""",
    "        first_epoch = global_step // num_update_steps_per_epoch": """\
        first_epoch = global_step // num_update_steps_per_epoch
    global_step, first_epoch = accelerator.job_step, accelerator.job_epoch""",
    "                global_step += 1": "                global_step = accelerator.job_step",
}
"""Of `accelerate_plain.py`, by the line as it was."""
GLUE = {
    **_IMPORTS,
    "    accelerator = Accelerator(cpu=True)": f"{_MANAGER}    accelerator = FaultTolerantAccelerator(manager, cpu=True)",
    "    progress_bar.update(completed_steps)": """\
    completed_steps, starting_epoch = accelerator.job_step, accelerator.job_epoch
    progress_bar.update(completed_steps)""",
    "                completed_steps += 1": "                completed_steps = accelerator.job_step",
}
"""Of `accelerate_glue.py`."""
SCRIPTS = {"diffusers": ("accelerate_plain.py", DIFFUSERS), "glue": ("accelerate_glue.py", GLUE)}


def group_script(folder: Path, shape: str = "diffusers") -> Path:
    """Write the script of a group; return where."""
    name, changes = SCRIPTS[shape]
    path = folder / f"{shape}_group.py"
    path.write_text(_changed(Path(__file__).with_name(name).read_text(), changes))
    return path


def lines_added(shape: str) -> list[str]:
    """Return the lines of a group's script that the plain one has not."""
    name, changes = SCRIPTS[shape]
    before = Path(__file__).with_name(name).read_text()
    lines = difflib.ndiff(before.splitlines(), _changed(before, changes).splitlines())
    return [line[2:].strip() for line in lines if line.startswith("+ ")]


def _changed(text: str, changes: dict[str, str]) -> str:
    for before, after in changes.items():
        assert text.count(f"{before}\n") == 1, before
        text = text.replace(f"{before}\n", f"{after}\n")
    return text
