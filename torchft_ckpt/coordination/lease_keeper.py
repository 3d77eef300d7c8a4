"""Keeps the lease of a lighthouse that is one of several: a shell around `core.coordination.leadership`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from torchft_ckpt.core.coordination.leadership import Answer, Call, Leadership, LeaseStore, StoreFailed
from torchft_ckpt.errors import CoordinationError

logger = logging.getLogger(__name__)

_SAY_AGAIN_S = 5.0


class LeaseKeeper:
    """Use on its event loop only.

    Args:
        store: where the lease is.
        on_change: called when this lighthouse begins to lead, with what the last leader wrote, and with None when it leads no
            more.
        data: returns what is to outlive this lighthouse while it leads.
        on_written: called when that was written.
    """

    def __init__(
        self,
        store: LeaseStore,
        *,
        on_change: Callable[[bytes | None], None],
        data: Callable[[], bytes],
        on_written: Callable[[], None],
    ) -> None:
        self.state = Leadership(store.lease_s)
        self._store, self._on_change, self._data, self._on_written = store, on_change, data, on_written
        self._loop = asyncio.get_running_loop()
        self._is_leading = self._is_over = False
        self._said, self._say_at = "", float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to ask for the lease.

        Raises:
            CoordinationError: the store refuses us. One that does not answer may come yet.
        """
        await self._call(Call.ACQUIRE, b"", is_first=True)
        self._task = self._loop.create_task(self._keep())

    async def stop(self) -> None:
        """Give the lease up. May be called twice."""
        self._is_over = True  # up to Python 3.11 `wait_for` may forget that it was cancelled
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(OSError, CoordinationError, asyncio.TimeoutError):
            await asyncio.wait_for(self._store.release(), self.state.patience_s(Call.RENEW))

    def leads(self) -> bool:
        """Whether this lighthouse may decide now."""
        self.look()
        return self._is_leading

    def look(self) -> None:
        """Note that time has passed, and say if that changes who leads."""
        state = self.state
        state.look(self._loop.time())
        leads = state.is_leading
        if leads is not self._is_leading:
            self._is_leading = leads
            if leads:
                logger.info("this lighthouse leads, by lease %d", state.fence)
            else:
                logger.warning("this lighthouse leads no more: %s", state.reason)
            self._on_change(state.data if leads else None)
        elif not leads and state.reason != self._said and self._may_say():
            self._said = state.reason
            logger.info("this lighthouse stands by: %s", state.reason)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if state.over_at is None else self._loop.call_at(state.over_at, self.look)

    def _may_say(self) -> bool:
        """Whether the last line of those that may come with each call was long enough ago."""
        now, say_at = self._loop.time(), self._say_at
        if now >= say_at:
            self._say_at = now + _SAY_AGAIN_S
        return now >= say_at

    def has_written(self) -> bool:
        """Whether what is to outlive this lighthouse is in the store. Else it is written as soon as may be."""
        if self._data() == self.state.data:
            return True
        self._has_news.set()
        return False

    async def _keep(self) -> None:
        while not self._is_over:
            data = self._data()
            call, at = self.state.next_call(data, self._loop.time())
            if (pause := at - self._loop.time()) > 0:
                self._has_news.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._has_news.wait(), pause)
                if self._has_news.is_set():
                    continue
            await self._call(call, data)

    async def _call(self, call: Call, data: bytes, *, is_first: bool = False) -> None:
        """Make a call of the store, and take what it answers. `is_first`: that the store refuses us is raised."""
        began, patience_s = self._loop.time(), self.state.patience_s(call)
        try:
            answer = await asyncio.wait_for(self._ask(call, data), patience_s)
        except asyncio.TimeoutError:
            answer = StoreFailed(f"nothing heard for {patience_s:g} s")
        except (OSError, CoordinationError) as error:
            if is_first and isinstance(error, CoordinationError):
                raise
            answer = StoreFailed(str(error))
        except (LookupError, TypeError, ValueError) as error:
            answer = StoreFailed(f"what it answers is not understood: {error!r}")
        self.state.answered(call, answer, began, self._loop.time(), data)
        self.look()
        if call is Call.WRITE and isinstance(answer, StoreFailed):
            if self._may_say():
                logger.warning("groups are told nothing before it is written down, and it cannot be: %s", answer.reason)
        elif call is Call.WRITE:
            self._on_written()

    async def _ask(self, call: Call, data: bytes) -> Answer:
        if call is Call.WRITE:
            return await self._store.write(data)
        return await (self._store.acquire() if call is Call.ACQUIRE else self._store.renew())
