"""Run a function in several gloo processes, each of which must finish."""

from __future__ import annotations

import faulthandler
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _worker(rank: int, world: int, port: int, run: Callable[..., None], extra: Any) -> None:
    faulthandler.enable()  # a crash says where it was
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    limit = timedelta(minutes=2)  # of one message
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
    try:
        run(*extra)
    finally:
        dist.destroy_process_group()


def run_processes(world: int, run: Callable[..., None], *extra: Any) -> None:
    """Call ``run(*extra)`` in ``world`` processes with a gloo group; raises if any fails."""
    mp.spawn(_worker, args=(world, _free_port(), run, extra), nprocs=world, join=True)
