"""The parts of a `Manager`, from the bottom up: each is made of those before it, and the connection comes last.

followers, registry   the state: what the user has registered, and what moves with its steps
healing               fetches a state
client                coordination: what this replica is, and what it and the others tell each other
serving               serves the state that is here
recovery              gets the state of a quorum
way_out               leaves the job on purpose
steps                 one step, from `start_quorum` to the decision
between_steps         what happens while no step is open; `starting`: before the first one
guard                 what optimizers do to the state
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchft_ckpt import config
from torchft_ckpt.checkpointing import CheckpointTransport, HTTPTransport, StateDictLock
from torchft_ckpt.core.coordination.messages import Outcome
from torchft_ckpt.core.coordination.replica import ReplicaSettings
from torchft_ckpt.core.training.goodput import FINISHED, LEFT, SHUT_DOWN
from torchft_ckpt.events import Event
from torchft_ckpt.manager.between_steps import BetweenSteps
from torchft_ckpt.manager.checking import EqualityCheck
from torchft_ckpt.manager.clearing import Clearing
from torchft_ckpt.manager.event_file import EventFile
from torchft_ckpt.manager.event_queue import EventQueue
from torchft_ckpt.manager.followers import Followers
from torchft_ckpt.manager.foreign_transport import as_ours
from torchft_ckpt.manager.guarding import StepGuard
from torchft_ckpt.manager.healing import Healing
from torchft_ckpt.manager.leaving import WayOut
from torchft_ckpt.manager.metrics import GroupMetrics
from torchft_ckpt.manager.outcomes import ManagerStatistics, StepOutcomes
from torchft_ckpt.manager.rank_config import RankConfig, Timeouts
from torchft_ckpt.manager.recovery import Recovery
from torchft_ckpt.manager.serving import StateServing
from torchft_ckpt.manager.starting import StartingRank
from torchft_ckpt.manager.state_registry import OwnState, StateRegistry
from torchft_ckpt.manager.step import Steps
from torchft_ckpt.manager.step_client import StepClient
from torchft_ckpt.manager.timekeeping import Timekeeper

if TYPE_CHECKING:
    from torchft_ckpt.process_group import ProcessGroup

logger = logging.getLogger(__name__)


class Parts:
    """What a Manager is made of.

    Args:
        given: the user's transport, None: this makes one.
        use_async_quorum, max_retries, quorum_retries, on_event: as in `Manager`.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        given: CheckpointTransport[Any] | None,
        rank_config: RankConfig,
        timeouts: Timeouts,
        settings: ReplicaSettings,
        *,
        use_async_quorum: bool,
        max_retries: int | None,
        quorum_retries: int | None,
        on_event: Callable[[Event], None] | None,
        heartbeat_interval: timedelta,
    ) -> None:
        self.timekeeper = Timekeeper(is_spare=settings.spare)
        rank_0 = rank_config.find_rank_0()
        party = rank_config.replica_id if rank_0 is None else rank_0.replica_id
        replay = config.replay()
        self.outcomes = StepOutcomes(
            party,
            min_replica_size=settings.min_replica_size,
            max_retries=max_retries,
            log_every=config.resolve(None, config.LOG_EVERY, timedelta(seconds=2), config.parse_pause),
            tells=None if replay is None else Path(replay.told_in) / str(rank_config.group_rank),
            is_spare=settings.spare or settings.fixed_with_spares,
        )
        has_metrics = rank_0 is None and replay is None
        metrics_port = config.resolve(None, config.METRICS_PORT, -1, config.parse_port) if has_metrics else -1
        place = config.resolve(None, config.EVENTS, "", str)
        file = None
        if place and replay is None:  # a replay's steps are none of the job's
            file = EventFile(place, replica_id=party, rank=rank_config.group_rank, job=rank_config.job)
        ours = None if given is None else as_ours(given, party)
        self.lock = (ours.state_lock if ours is not None else None) or StateDictLock(timeouts.collective)
        transport: CheckpointTransport[Any] = ours or HTTPTransport(
            timeout=timeouts.collective,
            num_chunks=0,
            hostname=rank_config.host,
            token=rank_config.token or None,
            lock=self.lock,
        )
        address = transport.metadata()
        where = f"{party} of job {rank_config.job} is process {os.getpid()} and serves its state at {address}"
        logger.info("%s", where)
        self.transport: CheckpointTransport[Any] = given or transport
        self.registry = StateRegistry(self.lock)
        self.followers = Followers(self.registry)
        self.own = OwnState()
        self.metrics = GroupMetrics(rank_config, self.timekeeper, self.statistics) if metrics_port >= 0 else None
        self.events = EventQueue(on_event, party, file)
        self.own.known.is_replay = replay is not None
        self.check = EqualityCheck(self.lock, self.own.known)
        self.healing = Healing(
            transport,
            timeouts.transfer,
            rank=rank_config.group_rank,
            world_size=rank_config.group_world_size,
            own=self.own,
        )
        self.client = StepClient(
            settings,
            party,
            job=rank_config.job,
            abort=pg.abort,
            cancel=self.healing.cancel,
            events=self.events,
            answer_leaves=self.check.answer,
            timekeeper=self.timekeeper,
        )
        serving = StateServing(transport, self.registry, self.own, self.lock, lease=timeouts.transfer, party=party)
        self.recovery = Recovery(
            self.healing,
            self.registry,
            serving,
            self.own,
            self.client,
            events=self.events,
            timekeeper=self.timekeeper,
            is_alone=rank_config.group_world_size == 1,
            limit=timeouts.transfer,
        )
        clearing = Clearing(pg, name=party, ask=self.client.ask_to_start)
        self.way_out = WayOut(self.client, clearing, self.timekeeper)
        self.steps = Steps(
            pg,
            transport,
            self.client,
            clearing,
            self.way_out,
            rank_config=rank_config,
            timeouts=timeouts,
            registry=self.registry,
            own=self.own,
            serving=serving,
            healing=self.healing,
            recovery=self.recovery,
            check=self.check,
            outcomes=self.outcomes,
            followers=self.followers,
            events=self.events,
            timekeeper=self.timekeeper,
            use_async_quorum=use_async_quorum,
            quorum_retries=quorum_retries,
            follows=settings.spare or settings.join_stall_limit_s is not None,
        )
        self.between_steps = BetweenSteps(
            self.client,
            self.steps,
            registry=self.registry,
            serving=serving,
            recovery=self.recovery,
            timekeeper=self.timekeeper,
            rank_config=rank_config,
        )
        self.starting = StartingRank(
            self.client,
            registry=self.registry,
            serving=serving,
            healing=self.healing,
            recovery=self.recovery,
            address=address,
            limit=timeouts.quorum,
        )
        self.guard = StepGuard(self.client, self.registry, serving, self.steps, self.timekeeper)
        try:
            if self.metrics is not None:
                self.events.count = self.metrics.note
                self.client.metrics_address = self.metrics.start(metrics_port)
            self.client.connect(
                rank_config,
                rank_0,
                on_leaving=self.way_out.heard,
                connect_beside=self.steps.connect_beside,
                heartbeat_interval=heartbeat_interval,
                connect_timeout=timeouts.connect,
            )
            self.steps.prepare_store(self.client.link.store_address())
        except BaseException as error:  # an interrupt too: nobody else could end it
            if (link := getattr(self.client, "link", None)) is not None:
                link.shutdown(f"its Manager could not be made: {error!r}")
            if given is None:
                transport.shutdown()
            self.end_events()
            raise

    def end_events(self) -> None:
        """Hand over the last events, write how this life has ended, and close the port of metrics."""
        self.events.deliver()
        if self.events.file is not None:
            ended = FINISHED if self.between_steps.has_finished else SHUT_DOWN
            self.events.file.end(LEFT if self.client.has_left else ended, self.timekeeper.close())
        if self.metrics is not None:
            self.metrics.shutdown()

    def statistics(self) -> ManagerStatistics:
        """See `Manager.statistics`."""
        now, counts = self.client.view(), self.outcomes.counts
        return ManagerStatistics(
            step=now.version.step,
            quorum_id=now.quorum.quorum_id if now.quorum else 0,
            num_committed=counts[Outcome.COMMIT],
            num_discarded=counts[Outcome.DISCARD],
            num_left_behind=counts[Outcome.LEFT_BEHIND],
            num_healed=self.recovery.num_healed,
            last_heal_s=self.healing.took_s,
            num_corrected=self.recovery.num_corrected,
        )
