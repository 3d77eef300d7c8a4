"""A member that came to the store and died before Gloo connected: nobody waits for it, and nothing is left behind."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

import pytest
from support.stores import hosted_store
from torch.distributed import PrefixStore

from torchft_ckpt import ProcessGroupGloo
from torchft_ckpt.errors import ProcessGroupAbortedError

LONG = timedelta(seconds=60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a connect ends by its timeout")
def test_an_abort_ends_the_thread_that_waits_inside_gloo_for_a_dead_members_address() -> None:
    store = hosted_store()
    PrefixStore("quorum", store).set("torchft_ckpt/came/1", "")  # rank 1 came, and is gone
    group = ProcessGroupGloo(timeout=LONG, connect_timeout=LONG)
    before = set(threading.enumerate())
    errors: list[Exception] = []

    def configure() -> None:
        try:
            group.configure(f"127.0.0.1:{store.port}/quorum", "a", 0, 2)
        except ProcessGroupAbortedError as error:
            errors.append(error)

    caller = threading.Thread(target=configure)
    caller.start()
    inside = PrefixStore("quorum", store)
    # Gloo publishes this rank's own address just before it waits for the other's.
    while inside.num_keys() < 2:
        caller.join(0.01)
    group.abort()
    caller.join(LONG.total_seconds() / 2)
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("pg-")]
    for thread in left:
        thread.join(LONG.total_seconds() / 2)
    assert [thread.name for thread in left if thread.is_alive()] == []
    assert len(errors) == 1
