"""What a lighthouse and a group's rank 0 export, as prometheus_client's own parser reads it; and that a job needs none of it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.replicas import Replica, Run, ends, lighthouse_of

from torchft_ckpt import Checkpointer, LighthouseServer
from torchft_ckpt.coordination.asking import Lighthouse
from torchft_ckpt.core.coordination.causes import CAUSES
from torchft_ckpt.core.coordination.waiting import Phase
from torchft_ckpt.core.services import metrics
from torchft_ckpt.core.training.ledger import Account
from torchft_ckpt.errors import CheckpointError, ConfigError
from torchft_ckpt.front import metrics as front_metrics
from torchft_ckpt.front.metrics import Exporter
from torchft_ckpt.manager.timekeeping import Timekeeper

parser = pytest.importorskip("prometheus_client.parser", reason="the extra metrics is not installed")
yaml = pytest.importorskip("yaml")
EXAMPLES = Path(__file__).parents[2] / "examples" / "prometheus"
PORT = "TORCHFT_CKPT_METRICS_PORT"
Series = dict[tuple[str, tuple[str, ...]], float]


def get(url: str, token: str = "") -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return str(response.read().decode())


def series(text: str) -> Series:
    """By name and the values of labels, in the order of the labels' names."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def families_of(text: str) -> set[str]:
    """Those that have no value yet, too."""
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


def names_of(known: Iterable[str]) -> set[str]:
    return {f"torchft_ckpt_{name}" for name in known}


def make_steps(
    server: LighthouseServer, num: int = 3, names: Sequence[str | None] = ("a", "b")
) -> tuple[Replica, Replica]:
    pair = Replica(server, names[0]), Replica(server, names[1])
    with ThreadPoolExecutor(2) as pool:
        for _ in range(num):
            [*pool.map(Replica.step, pair)]
    return pair


def metrics_of(server: LighthouseServer) -> dict[str, str]:
    """By group, what the status tells of its metrics."""
    members = Lighthouse(server.address(), None).status("default")["members"]
    return {member["replica_id"].partition(":")[0]: member["metrics"] for member in members}


def test_a_lighthouse_says_how_its_jobs_go() -> None:
    server = lighthouse_of(2)
    make_steps(server)
    text = get(f"{server.address()}/metrics")
    assert families_of(text) == names_of(metrics.OF_LIGHTHOUSE)
    said = series(text)
    assert said["torchft_ckpt_lighthouse_leads", ()] == 1.0
    assert said["torchft_ckpt_job_groups", ("default",)] == said["torchft_ckpt_job_participants", ("default",)] == 2.0
    newest = Lighthouse(server.address(), None).status("default")["newest_step"]
    assert said["torchft_ckpt_job_step", ("default",)] == newest
    assert said["torchft_ckpt_job_steps_committed_total", ("default",)] == newest > 0
    causes = {labels[0] for name, labels in said if name == "torchft_ckpt_job_steps_discarded_total"}
    assert causes == {*CAUSES}
    waited = {labels for name, labels in said if name == "torchft_ckpt_job_waited_for_seconds_total"}
    assert {(group, job) for group, job, _ in waited} <= {("a", "default"), ("b", "default")}
    assert {phase for _, _, phase in waited} <= {phase.value for phase in Phase}, "there is none if all were as quick"


def test_without_the_label_of_groups_they_are_counted_together() -> None:
    server = lighthouse_of(2, has_group_label=False)
    make_steps(server)
    said = series(get(f"{server.address()}/metrics"))
    waited = {labels for name, labels in said if name == "torchft_ckpt_job_waited_for_seconds_total"}
    assert waited == {("", "default", phase.value) for phase in Phase}, "no label is an empty one, for Prometheus"


def test_groups_without_a_name_are_one_in_metrics_and_none_in_the_status() -> None:
    server = lighthouse_of(2)
    make_steps(server, names=(None, None))
    said = series(get(f"{server.address()}/metrics"))
    waited = {labels[0] for name, labels in said if name == "torchft_ckpt_job_waited_for_seconds_total"}
    assert waited <= {"unnamed"}
    members = Lighthouse(server.address(), None).status("default")["members"]
    assert [member["waited_for_s"] for member in members] == [{}, {}], "what others were waited for is not its own"


def test_rank_0_of_each_group_says_how_it_goes_and_the_status_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, "0")
    server = lighthouse_of(2)
    one, _ = make_steps(server)
    addresses = metrics_of(server)
    assert len({*addresses.values()}) == 2
    text = get(f"http://{addresses['a']}/metrics")
    assert families_of(text) == names_of(metrics.OF_GROUP)
    said, us = series(text), ("a", "default")
    counted = one.manager.statistics()
    assert said["torchft_ckpt_step", us] == counted.step
    assert said["torchft_ckpt_steps_committed_total", us] == counted.num_committed > 0
    assert said["torchft_ckpt_quorum_id", us] == counted.quorum_id
    ledger = {labels: value for (name, labels), value in said.items() if name == "torchft_ckpt_ledger_seconds_total"}
    assert {*ledger} == {(account.value, *us) for account in Account}
    assert ledger[("productive", *us)] > 0.0
    phases = {labels for name, labels in said if name == "torchft_ckpt_phase_seconds_total"}
    assert phases == {(*us, phase.value) for phase in Phase}
    runs = re.compile(r"[0-9a-f]{8}")
    assert not [text for _, labels in said for text in labels if runs.search(text)], "never a run's own id"
    one.manager.shutdown()
    with pytest.raises(urllib.error.URLError):
        get(f"http://{addresses['a']}/metrics")


def test_who_came_in_has_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, "0")
    run = Run()
    late = Replica(run.server, "c", seed=7)
    run.end(late)
    said, us = series(get(f"http://{metrics_of(run.server)['c']}/metrics")), ("c", "default")
    assert said["torchft_ckpt_heals_total", us] == late.manager.statistics().num_healed == 1.0
    assert said["torchft_ckpt_heal_bytes_total", us] > 0.0
    assert said["torchft_ckpt_heal_seconds_total", us] > 0.0


def test_a_step_that_is_discarded_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT, "0")
    server = lighthouse_of(1)
    alone = Replica(server, "a", min_replica_size=2)
    assert not alone.step()
    said = series(get(f"http://{metrics_of(server)['a']}/metrics"))
    assert said["torchft_ckpt_steps_discarded_total", ("too few groups", "a", "default")] == 1.0
    assert series(get(f"{server.address()}/metrics"))[
        "torchft_ckpt_job_steps_discarded_total", ("too few groups", "default")
    ]


def test_metrics_need_the_token_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_CKPT_TOKEN", "secret")
    monkeypatch.setenv(PORT, "0")
    server = lighthouse_of(1)
    Replica(server, "a")
    for address in (server.address(), f"http://{metrics_of(server)['a']}"):
        for token in ("", "guess"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                get(f"{address}/metrics", token)
            assert raised.value.code == 401
        assert "torchft_ckpt_build_info" in get(f"{address}/metrics", "secret")


def test_a_group_whose_port_is_taken_trains_without_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        monkeypatch.setenv(PORT, str(taken.getsockname()[1]))
        server = lighthouse_of(1)
        alone = Replica(server, "a")
        assert alone.step()
    (said,) = [record.message for record in caplog.records if "has no metrics" in record.message]
    assert "the metrics port cannot listen on 127.0.0.1:" in said and f"{PORT}=0" in said
    assert metrics_of(server) == {"a": ""}


def test_what_is_no_port_is_refused_before_anything_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    server = lighthouse_of(1)
    monkeypatch.setenv(PORT, "70000")
    monkeypatch.setattr("torchft_ckpt.manager.parts.HTTPTransport", lambda **options: pytest.fail("it listens"))
    with pytest.raises(ConfigError, match=PORT):
        Replica(server, "a")


def test_without_the_client_a_job_trains_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PORT, "0")
    monkeypatch.setattr("torchft_ckpt.front.metrics.is_installed", lambda: False)
    monkeypatch.setattr("torchft_ckpt.manager.metrics.is_installed", lambda: False)
    server = lighthouse_of(1)
    assert Replica(server, "a").step()
    assert front_metrics.MISSING in caplog.text and metrics_of(server) == {"a": ""}
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(f"{server.address()}/metrics")
    assert (raised.value.code, raised.value.read().decode()) == (501, f"{front_metrics.MISSING}\n")


def test_who_asks_a_hundred_times_a_second_has_one_text_that_is_written_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front_metrics, "_FRESH_S", 1e9)
    num_collected, goes_on, write = 0, threading.Event(), front_metrics._write

    def collect() -> metrics.Samples:
        nonlocal num_collected
        num_collected += 1
        return {"job_step": {("j",): 7.0}}

    def write_later(samples: metrics.Samples) -> tuple[bytes, str]:
        assert goes_on.wait(60), "the loop of a lighthouse, which decides steps, waits for a text"
        return write(samples)

    async def ask() -> set[bytes]:
        exporter = Exporter(collect)
        asked = [asyncio.ensure_future(exporter.serve(None)) for _ in range(50)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        goes_on.set()
        return {(await answer).body for answer in asked} | {(await exporter.serve(None)).body}  # type: ignore[arg-type, misc]

    monkeypatch.setattr(front_metrics, "_write", write_later)
    (text,) = asyncio.run(ask())
    assert series(text.decode()) == {("torchft_ckpt_job_step", ("j",)): 7.0}
    assert num_collected == 1


def test_each_rule_and_each_panel_asks_for_what_is_exported() -> None:
    rules = yaml.safe_load((EXAMPLES / "rules.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    asked = {rule["alert"]: [rule["expr"]] for rule in rules}
    asked |= {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels}
    assert len(asked) == len(rules) + len(panels) > 20
    for name, expressions in asked.items():
        for expression in expressions:
            named = {*re.findall(r"torchft_ckpt_\w+", expression)}
            assert named and named <= names_of(metrics.METRICS), name


@pytest.mark.parametrize("label", ["account", "cause", "outcome", "phase"])
def test_what_rules_and_panels_choose_by_a_label_is_a_value_of_it(label: str) -> None:
    values = {
        "account": {account.value for account in Account},
        "cause": {*CAUSES},
        "outcome": {"saved", "failed"},
        "phase": {phase.value for phase in Phase},
    }
    text = (EXAMPLES / "rules.yml").read_text() + (EXAMPLES / "dashboard.json").read_text().replace('\\"', '"')
    assert {*re.findall(rf'{label}="([^"]*)"', text)} <= values[label]


def test_the_page_of_metrics_has_a_row_for_each() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "reference" / "metrics.md").read_text()
    rows = {line.split("`")[1]: line.split("|") for line in page.splitlines() if line.startswith("| `torchft_ckpt_")}
    assert {*rows} == names_of(metrics.METRICS)
    for name, (labels, told) in metrics.METRICS.items():
        row = rows[f"torchft_ckpt_{name}"]
        assert row[2].strip() == ", ".join(f"`{label}`" for label in labels.split())
        assert row[3].strip() == told


def test_saves_that_were_begun_are_counted_by_how_they_ended(tmp_path: Path) -> None:
    one = Replica(lighthouse_of(1), "a")
    checkpointer = ends(Checkpointer(str(tmp_path / "checkpoints"), manager=one.manager))
    keeper = one.manager.hooks.timekeeper
    with pytest.raises(CheckpointError, match="no part in the save"):
        checkpointer.save().result(60)
    assert keeper.num_ended_saves == {"saved": 0, "failed": 0}, "it was not begun, as nothing was committed"
    assert one.step()
    first = checkpointer.save()
    first.result(60)
    assert checkpointer.save() is first, "the state is the same, and so is the save"
    assert keeper.num_ended_saves == {"saved": 1, "failed": 0}
    assert one.step()
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").write_text("no folder")
    with pytest.raises(CheckpointError):
        checkpointer.save().result(60)
    assert keeper.num_ended_saves == {"saved": 1, "failed": 1}


def test_a_save_that_was_given_up_has_failed() -> None:
    keeper, save = Timekeeper(), Future[None]()
    keeper.saves(save)
    save.set_exception(CheckpointError("the next save began before this one was whole"))
    assert keeper.num_ended_saves == {"saved": 0, "failed": 1}
