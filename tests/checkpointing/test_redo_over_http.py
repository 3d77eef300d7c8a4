"""A learner follows the redo logs of others over HTTP: entry by entry, from whoever is left, and it hears why where it cannot."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import trustme
from faulty_proxy import FaultyProxy, flip_bit_at
from support.certificates import client_context, server_context
from support.redo import Noted, Source, bits, version
from support.sources import make_transport
from support.thoroughness import by_default

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.checkpointing.address import parse_metadata
from torchft_ckpt.checkpointing.fetching.redo import RedoFollower
from torchft_ckpt.checkpointing.fetching.source import SourceClient
from torchft_ckpt.checkpointing.state.redo_entry import RedoEntry
from torchft_ckpt.errors import ConfigError, SourceRefusedError, TransferCancelledError
from torchft_ckpt.manager.redo_recording import parameters_of
from torchft_ckpt.manager.redo_replay import apply_entry

LONG_S = 20.0


def model(seed: int = 0, width: int = 300) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 7))


class Scene:
    """One job whose steps several transports keep, and a learner that follows."""

    def __init__(self, num_sources: int = 1, *, width: int = 300, **how: Any) -> None:
        self.model = model(width=width)
        self.source = Source(torch.optim.AdamW(self.model.parameters()))
        self.transports: list[HTTPTransport[Any]] = [make_transport(**how) for _ in range(num_sources)]
        self.learner = model(width=width)
        self.fresh = torch.optim.AdamW(self.learner.parameters())
        self.here = version(0)
        self.follower: RedoFollower | None = None

    def begin(self, num_followers: int = 1) -> None:
        self.source.begin()
        for transport in self.transports:
            transport.redo_log.begin(version(self.source.step), num_followers, time.monotonic())

    def train(self, num_steps: int = 1) -> None:
        """Train, and `keep` it."""
        for _ in range(num_steps):
            self.source.train()
        self.keep()

    def keep(self) -> None:
        """Have all sources keep what was noted."""
        self.source.recorder.close()
        noted = self.source.noted
        for transport in self.transports:
            for entry, versions in zip(noted.entries, noted.versions, strict=True):
                transport.redo_log.append(entry, versions)
        noted.entries, noted.versions = [], []

    def follow(self, by: HTTPTransport[Any], urls: list[str] | None = None) -> RedoFollower:
        urls = [transport.metadata() for transport in self.transports] if urls is None else urls
        self.follower = by.follow_redo_logs(urls, [parameters_of(self.fresh)])
        return self.follower

    def step(self, timeout_s: float = LONG_S) -> RedoEntry | None:
        assert self.follower is not None
        entry = self.follower.next_entry(self.here, timeout_s)
        if entry is not None:
            apply_entry(entry, [self.fresh])
            self.here = entry.version
        return entry

    def is_equal(self) -> bool:
        return bits(self.learner.parameters()) == bits(self.model.parameters())

    def close(self) -> None:
        if self.follower is not None:
            self.follower.release()
        for transport in self.transports:
            transport.shutdown(wait=False)


@pytest.fixture
def scene() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*args: Any, **how: Any) -> Scene:
        made.append(Scene(*args, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def learner() -> Iterator[HTTPTransport[Any]]:
    transport = make_transport()
    yield transport
    transport.shutdown(wait=False)


def test_a_learner_comes_to_the_same_bits(scene: Callable[..., Scene], learner: HTTPTransport[Any]) -> None:
    job = scene()
    job.begin()
    job.train(3)
    job.follow(learner)
    for _ in range(3):
        assert job.step() is not None
    assert (job.here, job.is_equal()) == (version(3), True)
    assert job.step(timeout_s=0.0) is None, "it holds the newest state"


def test_a_step_that_counts_and_in_which_no_optimizer_stepped_is_an_entry_without_bytes(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    """As where a GradScaler skips a step that overflows."""
    job = scene(2)
    job.begin()
    job.source.commit()
    job.keep()
    job.train(1)
    job.follow(learner)
    assert [entry.steps for entry in [job.step()] if entry is not None] == [[]]
    job.step()
    assert (job.here, job.is_equal()) == (version(2), True)


def test_two_sources_share_the_gradients_of_a_small_model_in_small_runs(
    scene: Callable[..., Scene], learner: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks as large as those of states one source would send all of them."""
    sent: list[tuple[str, int]] = []
    receive_run = RedoFollower._receive_run

    def note_run(follower: RedoFollower, client: Any, manifest: Any, destination: Any, run: range, *more: Any) -> None:
        receive_run(follower, client, manifest, destination, run, *more)
        sent.append((client.name, len(run) * manifest.block_bytes))

    monkeypatch.setattr(RedoFollower, "_receive_run", note_run)
    job = scene(2, max_serve_bytes_per_s=20e6, block_bytes=4 * 1024 * 1024, width=1000)
    job.begin()
    job.train(1)
    job.follow(learner)
    job.step()
    total = sum(num_bytes for _, num_bytes in sent)
    assert len({name for name, _ in sent}) == 2
    assert max(num_bytes for _, num_bytes in sent) <= total / 8, (
        "so neither waits long for what the other one still sends"
    )


def test_who_waits_for_an_entry_gets_it_when_the_step_is_over(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    job = scene()
    job.begin()
    job.follow(learner)
    timer = threading.Timer(0.2, job.train)
    timer.start()
    assert job.step() is not None
    timer.join()
    assert job.is_equal()


def test_a_source_frees_what_its_only_follower_has(scene: Callable[..., Scene], learner: HTTPTransport[Any]) -> None:
    job = scene()
    job.begin()
    job.train(3)
    job.follow(learner)
    job.step()
    job.step()
    log = job.transports[0].redo_log
    assert "1 entries" in repr(log)
    job.step()
    assert "0 entries, 0 bytes, 1 followers" in repr(log)


def test_a_source_keeps_nothing_once_its_only_follower_has_left(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    job = scene()
    job.begin()
    job.train(2)
    job.follow(learner)
    job.step()
    assert job.follower is not None
    job.follower.release()
    assert not job.transports[0].redo_log.is_kept


def test_a_source_that_is_late_holds_nobody_up_and_is_asked_again(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    """The second one has not heard of the follower yet, then it is a step behind, then it has caught up."""
    job = scene(1)
    late = make_transport()
    job.begin()
    job.train(1)
    job.follow(learner, [late.metadata(), job.transports[0].metadata()])
    assert job.step() is not None
    job.transports.append(late)
    late.redo_log.begin(version(1), 1, time.monotonic())
    noted = job.source.noted
    job.source.train()
    job.source.recorder.close()
    job.transports[0].redo_log.append(noted.entries[0], noted.versions[0])
    assert job.step() is not None
    late.redo_log.append(noted.entries[0], noted.versions[0])
    noted.entries, noted.versions = [], []
    job.train(3)
    for _ in range(3):
        assert job.step() is not None
    assert (job.here, job.is_equal()) == (version(5), True)
    assert len(job.follower._clients) == 2, "none was left out"  # type: ignore[union-attr]


def test_sources_take_turns(scene: Callable[..., Scene], learner: HTTPTransport[Any]) -> None:
    job = scene(3)
    job.begin()
    job.train(6)
    job.follow(learner)
    for _ in range(6):
        job.step()
    assert job.is_equal()
    assert all("0 entries, 0 bytes, 1 followers" in repr(transport.redo_log) for transport in job.transports)


@pytest.mark.parametrize("lost_at", [0, 2])
def test_the_log_of_a_lost_source_goes_on_at_another_after_the_last_version_that_was_applied(
    scene: Callable[..., Scene], learner: HTTPTransport[Any], lost_at: int
) -> None:
    job = scene(2)
    job.begin()
    job.train(5)
    job.follow(learner)
    for _ in range(lost_at):
        job.step()
    job.transports[0].shutdown(wait=True)
    for _ in range(5 - lost_at):
        job.step()
    assert (job.here, job.is_equal()) == (version(5), True)


def served_by(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return what will count the blocks that each source brings."""
    found: Counter[str] = Counter()
    receive_run = RedoFollower._receive_run

    def counted(self: RedoFollower, client: Any, manifest: Any, destination: Any, run: range, scratch: Any) -> None:
        receive_run(self, client, manifest, destination, run, scratch)
        found[client.name] += len(run)

    monkeypatch.setattr(RedoFollower, "_receive_run", counted)
    return found


def test_an_entry_comes_from_all_sources_at_once(
    scene: Callable[..., Scene], learner: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sends at 200 kB/s: none could bring all of it before the next was asked."""
    blocks = served_by(monkeypatch)
    job = scene(3, max_serve_bytes_per_s=200_000)
    job.begin()
    job.train(1)
    job.follow(learner)
    job.step()
    assert (job.is_equal(), len(blocks)) == (True, 3), blocks
    num_bytes = sum(parameter.nbytes for parameter in job.model.parameters())
    assert job.follower.received_bytes < 1.1 * num_bytes  # type: ignore[union-attr]


def test_one_whose_entry_differs_brings_nothing_of_it(
    scene: Callable[..., Scene],
    learner: HTTPTransport[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One source has stepped with another learning rate."""
    blocks = served_by(monkeypatch)
    job, other = scene(1), scene(1)
    other.source.optimizers[0].param_groups[0]["lr"] = 0.5
    for one in (job, other):
        one.begin()
        one.train(1)
    job.transports += other.transports
    job.follow(learner)
    job.step()
    assert (job.is_equal(), len(blocks)) == (True, 1), blocks
    assert "differ in settings" in caplog.text


def test_one_that_dies_while_it_sends_an_entry_is_left_and_the_entry_comes_from_another(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    """The first one sends at 200 kB/s, and dies some blocks into an entry of 370 kB."""
    job = scene(1, max_serve_bytes_per_s=200_000)
    job.transports.append(make_transport())
    job.begin()
    job.train(2)
    job.follow(learner)
    killer = threading.Timer(0.5, job.transports[0].shutdown, kwargs={"wait": False})
    killer.start()
    for _ in range(2):
        job.step()
    killer.join()
    assert (job.here, job.is_equal()) == (version(2), True)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("where", ["fetch_redo_manifest", "open_blocks", "tell_redo_held"])
def test_one_whose_answers_raise_what_nobody_thought_of_is_left_and_the_entry_comes_from_another(
    scene: Callable[..., Scene], learner: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch, first: bool, where: str
) -> None:
    job = scene(2)
    job.begin()
    job.train(2)
    liar = job.transports[0 if first else 1].metadata()
    real = getattr(SourceClient, where)

    def fail(self: SourceClient, *rest: Any) -> Any:
        if self.name == liar:
            raise AttributeError("nobody thought of that")
        return real(self, *rest)

    monkeypatch.setattr(SourceClient, where, fail)
    follower = job.follow(learner)
    for _ in range(2):
        job.step()
    assert (job.here, job.is_equal()) == (version(2), True)
    assert liar not in repr(follower)


def test_where_no_source_is_left_each_ones_reason_is_heard(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    job = scene(2)
    job.begin()
    job.train(1)
    job.transports[0].redo_log.end("a step of AdamW raised ZeroDivisionError")
    job.transports[1].redo_log.end("the transport is tired")
    job.follow(learner)
    with pytest.raises(SourceRefusedError, match=r"AdamW raised ZeroDivisionError.*the transport is tired"):
        job.step()


def test_a_follower_that_is_too_slow_hears_which_memory_it_exceeded(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model().parameters())
    job = scene(1, redo_budget_bytes=2 * num_bytes)
    job.begin()
    job.train(2)
    job.follow(learner)
    job.step()
    job.train(2)
    with pytest.raises(SourceRefusedError, match=rf"this source may keep {2 * num_bytes} for followers"):
        job.step()


def test_an_entry_that_is_freed_while_it_is_asked_for_is_refused_with_a_reason(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    job = scene()
    job.begin()
    job.train()
    log = job.transports[0].redo_log
    ask = log.ask

    def ask_and_end(*asked: Any) -> object:
        answer = ask(*asked)
        log.end("a step of AdamW raised")
        return answer

    log.ask = ask_and_end
    job.follow(learner)
    with pytest.raises(SourceRefusedError, match=r"410 not_logged.*the redo entry of step 1 was freed"):
        job.step()


def test_the_ranks_of_a_machine_share_what_redo_logs_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []
    for said in ("", "4"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
        transport = make_transport()
        budgets.append(transport.redo_log._log.budget_bytes)
        transport.shutdown(wait=False)
    assert budgets[1] == budgets[0] // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE='many'"):
        make_transport()


def test_a_version_that_is_not_on_the_way_is_refused(scene: Callable[..., Scene], learner: HTTPTransport[Any]) -> None:
    job = scene()
    job.source.step = 5
    job.begin()
    job.follow(learner)
    with pytest.raises(SourceRefusedError, match="is not on its way"):
        job.step()


def test_a_gradient_that_is_written_to_later_is_never_sent(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    job = scene()
    job.begin()
    noted: Noted = job.source.noted
    job.source.train()
    job.source.recorder.close()
    (entry,) = noted.entries
    job.train(0)
    gradient = entry.steps[0].gradients[0]
    assert gradient is not None
    gradient.zero_()
    job.follow(learner)
    with pytest.raises(SourceRefusedError, match="was written to in place"):
        job.step()
    assert not job.transports[0].redo_log.is_kept


def test_a_learner_of_another_model_is_told_so_before_memory_is_taken(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    job = scene()
    job.begin()
    job.train()
    job.fresh = torch.optim.AdamW(model(width=301).parameters())
    job.follow(learner)
    with pytest.raises(SourceRefusedError, match=r"the gradient of parameter 0 of optimizer 0 is float32\[300, 300\]"):
        job.step()
    assert job.follower is not None
    assert job.follower.received_bytes == 0


def test_following_can_be_given_up_from_another_thread(
    scene: Callable[..., Scene], learner: HTTPTransport[Any]
) -> None:
    job = scene()
    job.begin()
    follower = job.follow(learner)
    threading.Timer(0.2, follower.close).start()
    with pytest.raises(TransferCancelledError):
        job.step()


@pytest.mark.parametrize(
    ("query", "named", "status"),
    [("after=1.2", True, 416), ("after=x.2.e", True, 416), ("", True, 416), ("after=0.2.e", False, 416)],
)
def test_a_request_that_is_none_is_refused(scene: Callable[..., Scene], query: str, named: bool, status: int) -> None:
    import http.client

    job = scene()
    job.begin()
    host, _, port = job.transports[0].metadata().removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    token = job.transports[0].token
    headers = {"X-Ckpt-Receiver": "me"} if named else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    connection.request("GET", f"/v1/redo?{query}", headers=headers)
    assert connection.getresponse().status == status
    connection.close()


def test_the_token_is_wanted(scene: Callable[..., Scene]) -> None:
    job = scene(1, token="a-secret-of-the-job")
    job.begin()
    stranger = make_transport(token="another-secret", stall_timeout=timedelta(seconds=5))
    try:
        job.follow(stranger)
        with pytest.raises(SourceRefusedError, match="unauthorized"):
            job.step()
    finally:
        stranger.shutdown(wait=False)


def test_it_goes_over_tls_as_well(scene: Callable[..., Scene]) -> None:
    authority = trustme.CA()
    job = scene(1, ssl_context=server_context(authority, "127.0.0.1"))
    job.begin()
    job.train(2)
    learner = make_transport(client_ssl_context=client_context(authority))
    try:
        job.follow(learner)
        job.step()
        job.step()
        assert job.is_equal()
        assert job.follower is not None
        job.follower.release()
    finally:
        learner.shutdown(wait=False)


@pytest.mark.slow
def test_any_bit_that_flips_on_the_way_changes_nothing_or_is_named(scene: Callable[..., Scene]) -> None:
    """In heads, manifest, blocks and digests of an entry of some 9 kB; that of a bit of a length may be a stall."""
    job = scene(1)
    job.model, job.learner = model(width=40), model(width=40)
    job.source = Source(torch.optim.AdamW(job.model.parameters()))
    job.fresh = torch.optim.AdamW(job.learner.parameters())
    job.begin(2)  # the other one does not come, so that the entry stays
    job.train()
    (expected,) = [kept.content[0] for kept in job.transports[0].redo_log._kept.values()]
    wanted = bits(gradient for step in expected.steps for gradient in step.gradients)
    generator = random.Random(0)
    learner = make_transport(stall_timeout=timedelta(seconds=0.3))
    outcomes: Counter[str] = Counter()
    reasons: list[str] = []
    try:
        for _ in range(by_default(60, thorough=200)):
            flip = flip_bit_at(generator.randrange(12_000), generator.randrange(8))
            with FaultyProxy(parse_metadata(job.transports[0].metadata()).port, flip) as proxy:
                follower = learner.follow_redo_logs([proxy.url], [parameters_of(job.fresh)])
                try:
                    entry = follower.next_entry(version(0), 0.2)
                    outcomes["nothing yet" if entry is None else "whole"] += 1
                    if entry is not None:
                        assert bits(gradient for step in entry.steps for gradient in step.gradients) == wanted
                except SourceRefusedError as error:
                    outcomes["named"] += 1
                    reasons.append(str(error))
                finally:
                    follower.close()
                    follower.release()
    finally:
        learner.shutdown(wait=False)
    assert outcomes["named"] > outcomes["whole"]
    assert all(reason.split("followed: ")[1] for reason in reasons)
