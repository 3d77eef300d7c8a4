"""Answers `/metrics`, in the text that Prometheus reads, by the `prometheus-client` of the extra `metrics`."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web

from torchft_ckpt.core.services.metrics import METRICS, Samples
from torchft_ckpt.threads import in_background

PATH = "/metrics"
MISSING = "metrics need the package prometheus-client: pip install 'torchft_ckpt[metrics]'"
_FRESH_S = 0.5
"""An answer is given again for so long: who asks a hundred times a second costs no more than who asks twice."""


def is_installed() -> bool:
    """Whether there is what makes the text."""
    return importlib.util.find_spec("prometheus_client") is not None


class Exporter:
    """The answers of one service, on its event loop. `collect` does not block."""

    def __init__(self, collect: Callable[[], Samples]) -> None:
        self._samples = collect
        self._answer: asyncio.Future[tuple[bytes, str]] | None = None
        self._until = 0.0

    async def serve(self, request: web.Request) -> web.Response:
        """Answer; 501 without the client. Whether somebody may ask was found out before."""
        if not is_installed():
            return web.Response(text=f"{MISSING}\n", status=501)
        now = asyncio.get_running_loop().time()
        if self._answer is None or (self._answer.done() and now >= self._until):
            write = functools.partial(_write, self._samples())
            self._answer = asyncio.wrap_future(in_background(write, "torchft_ckpt-metrics-text"))
            self._until = now + _FRESH_S
        body, kind = await self._answer
        return web.Response(body=body, headers={"Content-Type": kind})


def _write(samples: Samples) -> tuple[bytes, str]:
    """Return the text and its type. It takes a quarter of a second for ten thousand groups, and the import a tenth."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = []
    for name, values in samples.items():
        labels, told = METRICS[name]
        kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        families.append(kind(f"torchft_ckpt_{name}", told, labels=labels.split()))
        for key, value in values.items():
            families[-1].add_metric(key, value)
    registry = SimpleNamespace(collect=lambda: families)
    return generate_latest(cast(Any, registry)), CONTENT_TYPE_LATEST
