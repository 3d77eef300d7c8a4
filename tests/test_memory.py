"""How much memory a process may use, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchft_ckpt.memory import memory_bytes

MACHINE = memory_bytes(Path("/nowhere"))
LIMIT = 64 << 20
LESS = 32 << 20


def of(root: Path, cgroup: str, files: dict[str, str]) -> int | None:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_bytes(root)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/memory.max": f"{LIMIT}\n"}, LIMIT),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, MACHINE),
        ("0::/job/step\n", {"sys/fs/cgroup/job/memory.max": f"{LIMIT}\n"}, LIMIT),
        (
            "0::/job/step\n",
            {"sys/fs/cgroup/job/memory.max": f"{LIMIT}\n", "sys/fs/cgroup/job/step/memory.max": f"{LESS}\n"},
            LESS,
        ),
        ("5:cpu:/a\n4:memory:/a\n", {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{LIMIT}\n"}, LIMIT),
        ("4:memory:/docker/abc\n0::/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{LIMIT}\n"}, LIMIT),
        ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("no such line\n\n::\n", {}, MACHINE),
    ],
    ids=[
        "a container",
        "no limit",
        "of a parent",
        "the least",
        "version 1",
        "a path of the machine",
        "huge",
        "garbage",
    ],
)
def test_a_limit_of_the_control_group_counts_where_it_is_less(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    assert of(tmp_path, cgroup, files) == expected


def test_where_no_limit_is_told_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == MACHINE
    assert MACHINE is not None
