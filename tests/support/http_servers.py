"""HTTP servers on loopback that answer what a test tells them. They know nothing of the library."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer

HOST = "127.0.0.1"


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
        self._thread.join(60)
