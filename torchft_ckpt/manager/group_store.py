"""The store at which the ranks of one replica group find each other when they start. Nothing else is kept there.

Replica groups never meet there: for that rank 0 hosts a store of its own, which lives and dies with it (`rank_config`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from datetime import timedelta

import msgspec
from torch.distributed import TCPStore

from torchft_ckpt import config
from torchft_ckpt.core.coordination.meeting import (
    Claim,
    claim_key,
    decode_claim,
    encode_claim,
    group_of,
    is_believed,
    is_own_earlier,
    why_another_group,
    why_taken,
    with_proof,
)
from torchft_ckpt.errors import AuthenticationError, ConfigError, GroupBrokenError, ProcessGroupConfigureError
from torchft_ckpt.network import join_host_port, leave_to_parent
from torchft_ckpt.process_group.store import probe

logger = logging.getLogger(__name__)

_PROBE_S = 2.0
_LOOK_AGAIN_S = 0.05


class GroupStore:
    """A connection of one rank to the store of its group. Rank 0 hosts the store where nobody does yet.

    Args:
        addr, port: where; a launcher, rank 0's script (`init_process_group`) or rank 0 itself hosts it.
        group_rank: this rank.
        timeout: for all that is done here.
        job: its name.
        token: shared secret of the job; empty: what is found is believed.

    Raises:
        GroupBrokenError: it cannot be reached.
    """

    def __init__(self, addr: str, port: int, group_rank: int, timeout: timedelta, job: str, token: str) -> None:
        self._place = join_host_port(addr, port)
        self._group_rank = group_rank
        self._timeout = timeout
        self._claim: Claim | None = None
        self._job = job
        self._token = token
        self._key = claim_key(config.resolve(None, config.RUN_ID, "", str))
        try:
            hosted = self._host(addr, port) if group_rank == 0 else None
            self._store = hosted or TCPStore(addr, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            waited = f"within {timeout.total_seconds():g} s"
            message = f"group rank {group_rank} cannot reach its group's store at {self._place} {waited}: {error}"
            raise GroupBrokenError(message, self._place) from error

    def _host(self, addr: str, port: int) -> TCPStore | None:
        """Host the store; None where somebody does already."""
        if _listens(addr, port):
            return None
        try:
            # multi_tenant: where `init_process_group` asks for a store at this port it gets the same one.
            store = TCPStore(
                addr, port, is_master=True, wait_for_workers=False, timeout=self._timeout, multi_tenant=True
            )
        except RuntimeError:
            if _listens(addr, port):
                return None  # somebody was faster
            raise
        leave_to_parent(store)
        return store

    def claim(self, claim: Claim) -> None:
        """Take the store for the group of this rank 0, before anybody else is told of it.

        Raises:
            ConfigError: another group has it, and lives; the message names both.
            GroupBrokenError: it cannot be reached any more.
        """
        text = self._text_of(claim)
        self._claim = claim
        with self._named():
            while True:
                found = self._store.get(self._key).decode(errors="replace") if self._store.check([self._key]) else ""
                earlier = decode_claim(found, self._place) if found else None
                if earlier is not None and not is_own_earlier(earlier, claim) and _lives(earlier):
                    raise ConfigError(why_taken(earlier, self._place), party=self._place)
                if self._store.compare_set(self._key, found, text).decode() == text:
                    return

    def announce(self, manager_address: str) -> None:
        """Tell the other ranks where the manager service of this rank 0 is.

        Raises:
            GroupBrokenError: the store cannot be reached any more.
        """
        if self._claim is None:
            raise RuntimeError("internal error: the store was not taken")
        told = msgspec.structs.replace(self._claim, manager_address=manager_address)
        with self._named():
            self._store.set(self._key, self._text_of(told))

    def find_rank_0(self, name: str) -> Claim:
        """Wait until the rank 0 of this group has announced its manager service; what a dead one has left is waited out.

        Args:
            name: of the group, as this rank was started with; empty: none was given.

        Raises:
            ConfigError: another group is there.
            AuthenticationError: what is there was written by somebody who does not know the token.
            GroupBrokenError: it did not come in time.
        """
        give_up_at = time.monotonic() + self._timeout.total_seconds()
        with self._named():
            self._store.wait([self._key], self._timeout)
            while True:
                claim = decode_claim(self._store.get(self._key).decode(errors="replace"), self._place)
                known = config.secrets(self._token)
                is_believed_claim = any(is_believed(claim, secret, self._job, self._key) for secret in known)
                lives = is_believed_claim and _lives(claim)
                apart = why_another_group(claim, name, self._group_rank, self._place) if lives else ""
                if apart:
                    raise ConfigError(apart, party=self._place)
                if lives and claim.manager_address:
                    return claim
                if time.monotonic() >= give_up_at and not is_believed_claim:
                    raise AuthenticationError(
                        f"group rank {self._group_rank} does not believe what the store at {self._place} holds of its group (it"
                        f" names {group_of(claim)[:120]}): it was not written in this job by a process that knows this rank's"
                        " token. Set the same TORCHFT_CKPT_TOKEN and TORCHFT_CKPT_JOB for all ranks, and another MASTER_PORT for"
                        " each group; if they are set so, somebody else writes to that store",
                        party=self._place,
                    )
                if time.monotonic() >= give_up_at:
                    raise TimeoutError(
                        "its manager service does not run" if lives else "the one that was there is gone"
                    )
                time.sleep(_LOOK_AGAIN_S)

    def _text_of(self, claim: Claim) -> str:
        return encode_claim(with_proof(claim, self._token, self._job, self._key)).decode()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say of what torch's store raises who is concerned."""
        try:
            yield
        except AuthenticationError:
            raise
        except (TimeoutError, RuntimeError) as error:
            who = "it cannot write there" if self._group_rank == 0 else "group rank 0 has not created its Manager"
            message = (
                f"group rank {self._group_rank} heard nothing at its group's store at {self._place} within"
                f" {self._timeout.total_seconds():g} s: {who} ({error})"
            )
            raise GroupBrokenError(message, party=self._place) from error


def _lives(claim: Claim) -> bool:
    return _listens(*config.parse_host_port(claim.listens_at, what="address of group rank 0"))


def _listens(host: str, port: int) -> bool:
    try:
        probe(host, port, _PROBE_S)
    except ProcessGroupConfigureError as error:
        logger.debug("%s", error)
        return False
    return True
