"""A test that fails shows the last lines of the processes that it started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.processes import forget, last_lines


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed and (lines := last_lines(item.nodeid)):
        report.sections.append((f"Processes ({report.when})", lines))
    if report.when == "teardown":
        forget(item.nodeid)
