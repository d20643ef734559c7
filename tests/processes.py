"""Several processes of one test: a group of gloo ranks on the CPU, and what each of them found."""

import datetime
import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 300


def on_ranks(size: int, function: Callable[..., object], folder: Path, *arguments: object) -> list:
    """What `function(*arguments)`, of an importable module, returns on each of `size` ranks; they have one thread each.

    Ranks find one another through a file in `folder`, so that no port is taken.
    """
    mp.get_context("forkserver").set_forkserver_preload(["falcon_hf.context_parallel"])  # imported once for all ranks
    arguments = (size, str(folder), function, arguments)
    context = mp.start_processes(_rank, arguments, nprocs=size, join=False, start_method="forkserver")
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, f"{function.__name__} on {size} ranks took more than {SECONDS} s"
    finally:
        for process in context.processes:
            process.kill()
    return [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(size)]


def _rank(rank: int, size: int, folder: str, function: Callable[..., object], arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    (Path(folder) / f"rank-{rank}").write_bytes(pickle.dumps(function(*arguments)))
    gc.collect()  # with a model of several processes alive, closing their group can abort or hang (torch 2.13, gloo)
    dist.barrier()  # none leaves while another still talks to it
    dist.destroy_process_group()


def failures(checks: dict[str, Callable[[], None]]) -> dict[str, str]:
    """The error of each check by its name, "" where there is none: a rank that fails goes on with the others."""
    found = {}
    for name, check in checks.items():
        try:
            check()
            found[name] = ""
        except AssertionError:
            found[name] = traceback.format_exc()
    return found
