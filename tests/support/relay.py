"""Somebody on the way between a receiver and a source, who reads everything and may alter it. It knows HTTP, not the library."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from support.http_servers import HOST, Server


@dataclass
class Passing:
    """One request and its answer; what the answer's fields are set to is what the receiver gets."""

    method: str
    path: str
    request_headers: dict[str, str]
    request_body: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Relay:
    """Passes requests on to a port of this machine, and answers back, over one connection for each that comes in.

    Args:
        port: the source's.
        ask: may alter a request before it is passed on.
        answer: may alter an answer before it is passed back.
    """

    def __init__(
        self,
        port: int,
        *,
        ask: Callable[[Passing], object] = lambda passing: None,
        answer: Callable[[Passing], object] = lambda passing: None,
    ) -> None:
        self.passed: list[Passing] = []
        passed = self.passed

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                self.source = http.client.HTTPConnection(HOST, port, timeout=30)

            def finish(self) -> None:
                super().finish()
                self.source.close()

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                passing = Passing(self.command, self.path, dict(self.headers), body)
                passed.append(passing)
                ask(passing)
                self.source.request(passing.method, passing.path, passing.request_body or None, passing.request_headers)
                response = self.source.getresponse()
                passing.status, passing.headers = response.status, dict(response.getheaders())
                passing.body = response.read()
                answer(passing)
                self.send_response_only(passing.status)
                for name, value in passing.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(passing.body)

            do_POST = do_GET

        self._server = Server((HOST, 0), Handler)
        self.port: int = self._server.server_address[1]
        self._server.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()
