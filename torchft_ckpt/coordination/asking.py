"""Asks a lighthouse from outside of any group: what it knows of its jobs, where a job's state is, and an operator's words."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import msgspec

from torchft_ckpt import config
from torchft_ckpt.coordination.channel import cause_of, client_session, raise_if_tls, read_at_most, secured, service_url
from torchft_ckpt.coordination.lighthouse_connection import resolve_job
from torchft_ckpt.core.coordination.messages import (
    AllowStepLoss,
    Done,
    Drain,
    ForgetJob,
    Refused,
    decode_from_lighthouse,
    encode,
)
from torchft_ckpt.core.text import printable
from torchft_ckpt.errors import (
    AuthenticationError,
    ConfigError,
    LighthouseUnreachableError,
    RefusedError,
    SourceLostError,
)
from torchft_ckpt.network import parse_addresses
from torchft_ckpt.threads import in_background
from torchft_ckpt.tls import Tls, resolve_tls

MAX_STATUS_BYTES = 64 << 20
"""Ten times what one needs of a job with 20,000 groups."""
_MAX_GROUPS = 8
"""So many serve one reader."""
_T = TypeVar("_T")
_UNKNOWN_S = 10.0
"""The groups of a job come back within so long to a lighthouse that has started again."""


class Lighthouse:
    """One lighthouse, or the one of several that leads, as those see it that are in no group.

    Args:
        address: of several, all with commas between; default: the environment's.
        token: shared secret; default: the environment's, else that of the `run` on this machine that started the lighthouse.
        tls: default: the environment's, else plain HTTP is spoken.

    Raises:
        ConfigError: there is no address, or it is none.
    """

    def __init__(self, address: str | None, token: str | None, tls: Tls | None = None) -> None:
        address = config.resolve(address, config.LIGHTHOUSE, "", str)
        if not address:
            raise ConfigError("no lighthouse address: pass --lighthouse or set TORCHFT_LIGHTHOUSE", "lighthouse")
        self._tls = tls or resolve_tls()
        self._addresses = parse_addresses(address, what="lighthouse address", has_tls=self._tls is not None)
        self.address = self._addresses[0]
        """Of the one that was asked last."""
        self.token = config.token_for(self.address, token)
        self._has_found = False
        self._unknown_since: float | None = None

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {config.secrets(self.token)[0]}"} if self.token else {}

    def status(self, job: str | None) -> dict[str, Any]:
        """Return what it knows of a job, or of all of them in short. Another server than a lighthouse may answer.

        Raises:
            ConfigError: it knows no such job.
            AuthenticationError: it refuses our token; or a `TlsError`.
            LighthouseUnreachableError: it does not answer, or is none.
        """
        ask = self._of_leader(lambda: self._status(job))
        return in_background(lambda: asyncio.run(ask), "torchft_ckpt-asks").result()

    def urls(self, job: str | None) -> list[list[str]]:
        """Return where the newest state of a job is now: of some groups that hold it, the URL of each rank.

        Raises: as `status`, and
            SourceLostError: no group of the job is here that holds it and has told its URLs. Or the job is not known, and was
                before, or has not been for some seconds only: the lighthouse may have started again.
        """
        job = resolve_job(job)
        try:
            status = self.status(job)
        except ConfigError as error:
            now = time.monotonic()
            self._unknown_since = now if self._unknown_since is None else self._unknown_since
            if self._has_found or now < self._unknown_since + _UNKNOWN_S:
                raise SourceLostError(str(error), job) from error
            self._unknown_since = None
            raise
        self._unknown_since = None
        if "finished_at" in status:
            raise ConfigError(f"job {job} is finished: nobody serves its state any more; read its checkpoints", "job")
        try:
            known = msgspec.convert(status, _JobStatus)
        except msgspec.ValidationError as error:
            raise self._is_none(f"its status cannot be read: {error}") from error
        self._has_found = True
        there = [member for member in known.members if member.urls and member.step >= known.newest_step]
        chosen = [member for member in there if member.replica_id in known.participants] or there
        if not chosen:
            told = f"no group of job {job} is at the lighthouse at {self.address} with step {known.newest_step}"
            raise SourceLostError(told, job)
        return [member.urls for member in chosen[:_MAX_GROUPS]]

    def tell(self, job: str | None, word: AllowStepLoss | Drain | ForgetJob) -> str:
        """Say the operator's word; return what follows from it.

        Raises: as `status`, and
            RefusedError: it did not do it.
        """
        query = {} if job is None else {"job": resolve_job(job)}
        return asyncio.run(self._of_leader(lambda: self._tell(query, word)))

    async def _of_leader(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask one after the other, first the one that answered last; of those that stand by, or do not answer, the next."""
        first = self._addresses.index(self.address)
        why: list[str] = []
        for address in (*self._addresses[first:], *self._addresses[:first]):
            self.address = address
            try:
                return await ask()
            except LighthouseUnreachableError as error:
                if len(self._addresses) == 1:
                    raise
                why.append(str(error))
        every = ",".join(self._addresses)
        raise LighthouseUnreachableError(f"none of the lighthouses at {every} leads: {'; '.join(why)}", every)

    async def _status(self, job: str | None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=10)
        query = {} if job is None else {"job": resolve_job(job)}
        try:
            async with client_session(self._headers | {"Accept-Encoding": "identity"}) as session:
                url = service_url(self.address, "/", self._tls)
                async with session.get(url, params=query, timeout=timeout, **secured(self._tls)) as response:
                    if response.status == 404 and job is not None:
                        told = f"the lighthouse at {self.address} knows no job {job}; `status` lists them"
                        raise ConfigError(told, "job")
                    raise_if_tls(response.headers, "the lighthouse", self.address, self._tls)
                    self._check(response.status)
                    if "Content-Encoding" in response.headers:
                        raise self._is_none("it compresses its answer, and was asked not to")
                    body = await read_at_most(response, MAX_STATUS_BYTES)
                    if len(body) > MAX_STATUS_BYTES:
                        raise self._is_none(f"its status is longer than {MAX_STATUS_BYTES >> 20} MiB")
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise_if_tls(error, "the lighthouse", self.address, self._tls)
            why = cause_of(error, self._tls) if str(error) else "the status was not there after 10 s"
            raise self._is_silent(why) from error
        try:
            status = json.loads(body)
            if not isinstance(status, dict):
                raise ValueError("it is no JSON object")
        except (ValueError, RecursionError) as error:
            raise self._is_none(f"its status cannot be read: {error}") from error
        if status.get("leads") is False:
            raise self._stands_by(str(status.get("reason")))
        return status

    async def _tell(self, query: dict[str, str], word: AllowStepLoss | Drain | ForgetJob) -> str:
        party = f"the lighthouse at {self.address}"
        try:
            async with client_session(self._headers) as session:
                url = service_url(self.address, "/v1/groups", self._tls)
                socket = await asyncio.wait_for(session.ws_connect(url, params=query, **secured(self._tls)), 10)
                await socket.send_str(encode(word))
                answer = await socket.receive(timeout=10)
                await socket.close()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise_if_tls(error, "the lighthouse", self.address, self._tls)
            if isinstance(error, aiohttp.WSServerHandshakeError):
                self._check(error.status)
                raise self._is_none(f"HTTP {error.status}") from error
            raise self._is_silent(cause_of(error, self._tls)) from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise LighthouseUnreachableError(f"{party} closed the connection without an answer", self.address)
        said = decode_from_lighthouse(answer.data, party)
        if isinstance(said, Refused) and said.code == "standby":
            raise self._stands_by(said.reason)
        if isinstance(said, Refused):
            raise RefusedError(f"{party} did not do it: {said.reason}", self.address)
        return said.text if isinstance(said, Done) else ""

    def _check(self, status: int) -> None:
        if status in (401, 403):
            told = f"the lighthouse at {self.address} refused our token; set TORCHFT_CKPT_TOKEN, or pass --token-file"
            raise AuthenticationError(told, self.address)
        if status != 200:
            raise self._is_none(f"HTTP {status}")

    def _is_silent(self, why: str) -> LighthouseUnreachableError:
        return LighthouseUnreachableError(f"no lighthouse answers at {self.address}: {why}", self.address)

    def _stands_by(self, why: str) -> LighthouseUnreachableError:
        told = f"the lighthouse at {self.address} does not lead: {printable(why)}"
        return LighthouseUnreachableError(told, self.address)

    def _is_none(self, why: str) -> LighthouseUnreachableError:
        told = f"what answers at {self.address} is no lighthouse of ours: {why}"
        return LighthouseUnreachableError(told, self.address)


class _Member(msgspec.Struct):
    replica_id: str
    step: int
    urls: list[str]


class _JobStatus(msgspec.Struct):
    newest_step: int
    participants: list[str]
    members: list[_Member]
