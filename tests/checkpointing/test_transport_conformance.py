"""Both transports that the library ships keep the contract."""

from __future__ import annotations

import pytest
from support.fake_transport import FakeNetwork

from torchft_ckpt.checkpointing import HTTPTransport
from torchft_ckpt.testing.transport_conformance import CHECKS, Check, ConformanceError, check_transport


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_http_transport_conforms(check: Check) -> None:
    check(lambda: HTTPTransport(hostname="127.0.0.1", bind="127.0.0.1"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_http_transport_conforms_with_one_stream_and_small_blocks(check: Check) -> None:
    check(lambda: HTTPTransport(num_chunks=1, hostname="127.0.0.1", bind="127.0.0.1", block_bytes=4096))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_fake_transport_conforms(check: Check) -> None:
    check(FakeNetwork[dict]().transport)


def test_the_check_finds_a_transport_that_serves_the_live_state() -> None:
    network: FakeNetwork[dict] = FakeNetwork()

    def broken():
        transport = network.transport()
        transport.disallow_checkpoint = lambda: None
        return transport

    with pytest.raises(ConformanceError, match="mutated after disallow"):
        check_transport(broken)
