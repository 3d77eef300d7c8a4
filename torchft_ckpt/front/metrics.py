"""Answers `/metrics`, in the text that Prometheus reads, by the `prometheus-client` of the extra `metrics`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from aiohttp import web

from torchft_ckpt.core.services.metrics import METRICS, Samples, labelled
from torchft_ckpt.threads import in_background

PATH = "/metrics"
MISSING = "metrics need the package prometheus-client: pip install 'torchft_ckpt[metrics]'"
_FRESH_S = 0.5
"""An answer is given again for so long: who asks a hundred times a second costs no more than who asks twice."""


def is_installed() -> bool:
    """Whether there is what makes the text."""
    return importlib.util.find_spec("prometheus_client") is not None


class Exporter:
    """The answers of one service, on its event loop. `collect` does not block. `without`: a label that is left out."""

    def __init__(self, collect: Callable[[], Samples], *, without: str = "") -> None:
        self._samples = collect
        self._without = without
        self._text, self._until = b"", 0.0

    async def serve(self, request: web.Request) -> web.Response:
        """Answer; 501 without the client. Whether somebody may ask was found out before."""
        if not is_installed():
            return web.Response(text=f"{MISSING}\n", status=501)
        if "prometheus_client" not in sys.modules:  # a tenth of a second, for which the loop waits for nobody
            await asyncio.wrap_future(in_background(lambda: importlib.import_module("prometheus_client"), "metrics"))
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        now = asyncio.get_running_loop().time()
        if now >= self._until:
            self._text, self._until = generate_latest(cast(Any, self)), now + _FRESH_S
        return web.Response(body=self._text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics, as the client asks a registry for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, values in self._samples().items():
            labels, values = labelled(name, values, self._without)
            kind: Any = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"torchft_ckpt_{name}", METRICS[name][1], labels=labels)
            for key, value in values.items():
                family.add_metric(key, value)
            yield family
