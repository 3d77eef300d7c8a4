"""HTTP servers on loopback that answer what a test tells them. They know nothing of the library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
Answer = tuple[int, bytes, dict[str, str]]
"""Status, body, headers."""


class Server(ThreadingHTTPServer):
    """An HTTP server for clients that hang up when they please."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a receiver that has seen enough cuts its connection."""

    def start(self) -> str:
        """Serve on a thread, and return the URL."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return f"http://{HOST}:{self.server_address[1]}"

    def end(self) -> None:
        """Accept nothing more. May be called again."""
        self.shutdown()
        self.server_close()
        self._thread.join(20)


def serve(answer: Callable[[str], Answer]) -> tuple[str, Server]:
    """Answer each request by its path, until the server ends; return the URL as well."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, body, headers = answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = Server((HOST, 0), Handler)
    return server.start(), server
