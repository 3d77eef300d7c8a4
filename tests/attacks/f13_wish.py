"""One client asks a training job for its newest state again and again, each time as a new receiver, and fetches nothing.

Each such question makes the trainer publish its state at the end of a step. What a step takes is compared with and without it.
"""

from __future__ import annotations

import argparse
import http.client
import subprocess
import sys
import time
import uuid

MOST_TIMES_SLOWER = 3.0
"""Attacker and trainer share the cores of one machine, and perhaps others do."""


def ask_in_a_loop(host: str, seconds: float) -> None:
    print("begins", flush=True)
    until, num = time.monotonic() + seconds, 0
    connection = http.client.HTTPConnection(host)
    while time.monotonic() < until:
        try:
            headers = {"X-Ckpt-Receiver": uuid.uuid4().hex}
            connection.request("GET", "/v1/checkpoint/latest/manifest?wait_s=1", headers=headers)
            connection.getresponse().read()
            num += 1
        except (OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(host)
    print(num)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mib", type=int, nargs="?", default=16, help="MiB of parameters (default: %(default)d)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each phase (default: %(default)g)")
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        ask_in_a_loop(options.ask[0], float(options.ask[1]))
        return 0
    import torch  # here, as the attacker is to begin at once
    from torch import nn

    from torchft_ckpt import LighthouseServer, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    lighthouse = LighthouseServer("127.0.0.1:0", 1, hostname="127.0.0.1")
    module = nn.Linear(1024, options.mib * 256, bias=False)
    manager = Manager(
        ProcessGroupGloo(),
        module.load_state_dict,
        module.state_dict,
        min_replica_size=1,
        lighthouse_addr=lighthouse.address(),
        hostname="127.0.0.1",
        replica_id="g0",
    )
    optimizer = Optimizer(manager, torch.optim.SGD(module.parameters(), lr=1e-3))
    batch = torch.randn(4, 1024)

    def median_step(seconds: float) -> float:
        took, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            started = time.monotonic()
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
            took.append(time.monotonic() - started)
        return sorted(took)[len(took) // 2]

    median_step(options.seconds / 3)
    alone = median_step(options.seconds)
    host = manager._transport.metadata().removeprefix("http://")
    attacker = subprocess.Popen(
        [sys.executable, __file__, "--ask", host, str(options.seconds)], stdout=subprocess.PIPE, text=True
    )
    assert attacker.stdout is not None
    attacker.stdout.readline()
    attacked = median_step(options.seconds)
    num_asked = int(attacker.communicate()[0])
    manager.shutdown()
    lighthouse.shutdown()
    seen = f"{num_asked} questions, a step takes {1000 * attacked:.1f} ms, without them {1000 * alone:.1f} ms"
    if attacked > MOST_TIMES_SLOWER * alone or num_asked < 10:
        print(f"VULNERABLE: {seen}")
        return 1
    print(f"held: {seen}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
