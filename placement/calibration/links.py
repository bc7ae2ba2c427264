"""Times all-reduces between this machine's GPUs (NCCL), or between processes on a CPU (gloo)."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import statistics
import time
from typing import Any

from placement.calibration.samples import AllReduce

_SIZES = tuple(2**power for power in range(13, 28, 2))
_CPU_SIZES = tuple(2**power for power in range(11, 24, 2))
_REPEATS = 20
_TIMEOUT_S = 60.0


def measure_links(num_gpus: int, *, is_cpu: bool) -> list[AllReduce]:
    """All-reduces of some sizes over `num_gpus` processes; none if they do not come about."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    port = _free_port()
    processes = [
        context.Process(
            target=_reduce, args=(rank, num_gpus, is_cpu, port, send if rank == 0 else None)
        )
        for rank in range(num_gpus)
    ]
    try:
        for process in processes:
            process.start()
        send.close()
        found: list[AllReduce] = []
        with contextlib.suppress(EOFError):
            if receive.poll(_TIMEOUT_S):
                found = receive.recv()
        for process in processes:
            process.join(5.0)
        return found
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _reduce(rank: int, num_gpus: int, is_cpu: bool, port: int, send: Any) -> None:
    import torch
    from torch import distributed

    device = "cpu" if is_cpu else f"cuda:{rank}"
    if is_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if is_cpu else "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_gpus,
    )
    found = []
    for size in _CPU_SIZES if is_cpu else _SIZES:
        message = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        times = []
        for repeat in range(_REPEATS + 2):
            distributed.barrier()
            begun = time.perf_counter()
            distributed.all_reduce(message)
            if not is_cpu:
                torch.cuda.synchronize()
            if repeat >= 2:
                times.append(time.perf_counter() - begun)
        found.append(AllReduce(num_gpus=num_gpus, num_bytes=size, seconds=statistics.median(times)))
    if send is not None:
        send.send(found)
        send.close()
    distributed.barrier()
    distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
