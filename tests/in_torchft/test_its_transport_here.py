"""torchft's own `PGTransport` in our Manager: it is refused by name.

`scripts/test-torchft` runs this in an environment that has torchft; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta

import pytest
import torch

from torchft_ckpt import LighthouseServer, Manager, ProcessGroupGloo
from torchft_ckpt.errors import ConfigError

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft is not installed; scripts/test-torchft runs this", allow_module_level=True)

pytestmark = [pytest.mark.slow]
SHORT = timedelta(seconds=30)


def test_torchfts_transport_over_the_process_group_is_refused_by_name() -> None:
    from torchft.checkpointing.pg_transport import PGTransport

    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    group = ProcessGroupGloo(timeout=SHORT)
    with pytest.raises(
        ConfigError, match=r"torchft\.checkpointing\.pg_transport\.PGTransport sends over the process group"
    ):
        Manager(
            group,
            None,
            None,
            min_replica_size=1,
            lighthouse_addr=server.address(),
            replica_id="group_0",
            hostname="127.0.0.1",
            checkpoint_transport=PGTransport(group, SHORT, torch.device("cpu")),
        )
    server.shutdown()
