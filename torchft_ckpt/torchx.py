"""A component for TorchX, in torchft's place: each replica group of a job is a role, and torchrun runs its ranks.

    component=$(python -c 'import torchft_ckpt.torchx; print(torchft_ckpt.torchx.__file__)'):hsdp
    TORCHFT_LIGHTHOUSE=host:29510 torchx run --scheduler local_cwd $component --replicas 3 --script train.py -- --steps 1000

TorchX reads the annotations of a component as values, and its docstring for `--help`.
"""

import secrets
from typing import Dict, Optional  # noqa: UP035  # what TorchX's own check of a component knows

from torchx import specs

from torchft_ckpt import config
from torchft_ckpt.errors import ConfigError


def hsdp(
    *script_args: str,
    replicas: int = 2,
    workers_per_replica: int = 1,
    max_restarts: int = 3,
    script: str = "train_ddp.py",
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    image: str = "",
    h: Optional[str] = None,  # noqa: UP045
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
) -> specs.AppDef:
    """Replica groups of one job; a group that dies is started again, and no other with it. The lighthouse runs elsewhere.

    Args:
        script_args: arguments of the script
        replicas: replica groups
        workers_per_replica: ranks of each group
        max_restarts: how often a group is started again: by torchrun, and, where it ends altogether, by the scheduler
        script: what each rank runs
        env: variables of all groups, beside TORCHFT_LIGHTHOUSE and TORCHFT_CKPT_JOB, which are taken from here if they are set
        image: of the scheduler's containers
        h: a resource by its name, in place of cpu, gpu and memMB
        cpu: of each group
        gpu: of each group
        memMB: of each group
    """
    if replicas < 1 or workers_per_replica < 1:
        raise ConfigError(
            f"replicas={replicas}, workers_per_replica={workers_per_replica}: at least one of each has to train",
            "replicas",
        )
    shared = {
        config.LIGHTHOUSE[-1]: config.resolve(None, config.LIGHTHOUSE, "localhost:29510", str),
        # Else a lighthouse that saw the last run of this job would have the new one go on with that.
        config.JOB[0]: config.resolve(None, config.JOB, f"torchx-{secrets.token_hex(4)}", str),
        "NUM_REPLICA_GROUPS": str(replicas),
        # Else ranks that torchrun starts again, and that call init_process_group, may look for the rank 0 that died.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **({} if gpu or h else {"CUDA_VISIBLE_DEVICES": ""}),
        **(env or {}),
    }
    roles = [
        specs.Role(
            name=f"replica_{group}",
            image=image,
            entrypoint="torchrun",
            args=[
                "--standalone",
                "--nnodes=1",
                f"--nproc_per_node={workers_per_replica}",
                f"--max_restarts={max_restarts}",
                *([script] if script else []),
                *script_args,
            ],
            env={"REPLICA_GROUP_ID": str(group), **shared},
            num_replicas=1,
            max_retries=max_restarts,
            retry_policy=specs.RetryPolicy.REPLICA,  # APPLICATION, the default, starts all groups again
            resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        )
        for group in range(replicas)
    ]
    return specs.AppDef(name="torchft", roles=roles)
