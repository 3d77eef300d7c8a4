"""For all tests: one that fails is named at once and shows the last lines of its processes; one fails that leaves something to
the next; unknown names are looked up quickly; the longest begin first; each step has its line in the log.

Drawn examples have no deadline: on a busy machine any of them may take long. They are the same in each run that is not thorough.

torch's store looks up the name of each address that connects. For 127.0.0.1 at a socket of both families that is
`::ffff:127.0.0.1`, which is in no /etc/hosts, so a name server is asked, and a packet that is lost costs glibc 5 s.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.leftovers import none_left
from support.processes import forget, last_lines

gc.disable()  # until all tests are collected: to look for garbage in what is imported takes a fifth of that time
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
os.environ.setdefault("TORCHFT_CKPT_LOG_EVERY_SEC", "0")
with suppress(ImportError):  # it is not in the environments of scripts/test-torchft and scripts/test-xla
    from hypothesis import HealthCheck, settings
    from support.thoroughness import by_default

    settings.register_profile(
        "no wall clock",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=by_default(True, thorough=False),
    )
    settings.load_profile("no wall clock")


class FailuresAtOnce:
    """Names each test that fails when it does: a run that is stopped before its end prints no summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            lines = report.longreprtext.strip().splitlines() or [""]
            crash = getattr(report.longrepr, "reprcrash", None)  # of the last in a chain of exceptions
            why = crash.message.splitlines()[0] if crash is not None and crash.message else lines[-1]
            self._terminal.write(f"\n{report.nodeid} failed: {why}\n")


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(FailuresAtOnce(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each process of xdist begin with other files: asserts are rewritten once then, and found by the others."""
    report = yield
    here = getattr(collector.config, "workerinput", None)
    if here is not None and isinstance(collector, pytest.Directory):
        first = len(report.result) * int(here["workerid"][2:]) // here["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin the share of each process (xdist deals equal ones) with some of the longest: the last one would hold up the end."""
    if not hasattr(config, "workerinput"):
        return
    items.sort(key=lambda item: item.path)  # the same in each process
    num_shares = config.workerinput["workercount"]
    longest = [item for item in items if item.get_closest_marker("longest")]
    others = [item for item in items if not item.get_closest_marker("longest")]
    dealt: list[pytest.Item] = []
    for number in range(num_shares):
        share, first = (len(items) - len(dealt)) // (num_shares - number), longest[number::num_shares]
        num_others = max(share - len(first), 0)
        dealt += [*first, *others[:num_others]]
        del others[:num_others]
    items[:] = dealt


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported and collected is nobody's garbage: no collection, of which tests ask for many, looks at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed and (lines := last_lines(item.nodeid)):
        report.sections.append((f"Processes ({report.when})", lines))
    if report.when == "teardown":
        forget(item.nodeid)


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test starts ends with it, unless it may belong to a fixture that other tests of its file use."""
    fixtures = request.node._fixtureinfo.name2fixturedefs
    scopes = {definitions[-1].scope for name, definitions in fixtures.items() if name != file_leaves_nothing.__name__}
    belongs_to_test = not scopes & {"class", "module", "package"}
    yield from none_left(request.node.nodeid) if belongs_to_test and is_ours(request) else [None]


@pytest.fixture(autouse=True, scope="module")
def file_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from none_left(request.node.nodeid) if is_ours(request) else [None]


def is_ours(request: pytest.FixtureRequest) -> bool:
    """Whether it is no test of a framework or a device: these start threads and set variables as they like."""
    folder = request.path.parent.name
    return not folder.startswith(("in_", "on_"))
