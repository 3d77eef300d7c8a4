"""A process that holds a lighthouse of either library, one of several perhaps, and the stores that torchft's groups meet at.

The stores live here because torchrun would host them outside the workers too; our library makes its own where none is named.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from bench import sides
from bench.transport_links import enter
from bench.wire import Reporter


def main() -> None:
    """Start the lighthouse, report its address, serve until the parent closes our input or kills us."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    reporter = Reporter()
    if namespace := options.get("namespace"):
        enter(namespace)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = dict(options["settings"])
    if etcd := options.get("etcd"):
        from torchft_ckpt.coordination.etcd_store import EtcdStore

        settings |= {"hostname": "127.0.0.1", "store": lambda address: EtcdStore(etcd, leader=address)}
    lighthouse = sides.load_lighthouse(options["side"])(bind=f"{options.get('host', '127.0.0.1')}:0", **settings)
    stores = []
    for _ in range(options.get("num_stores", 0)):
        from torch.distributed import TCPStore

        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    reporter.emit("address", address=lighthouse.address(), store_ports=[store.port for store in stores])
    sys.stdin.read()
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
