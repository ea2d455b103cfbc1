"""Several processes that meet, for tests: each runs one function as one rank."""

import contextlib
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from banyan.ops.cpu.build import cached_library, compilers
from banyan.ops.cpu.library import Library
from banyan.parallel.collectives import COLLECTIVES, Rendezvous
from banyan.parallel.groups import Group
from tests.support.nccl_over_gloo import pretend_nccl

Work = Callable[..., Any]
LIMIT_S = 100
has_compiler = any(compilers())
needs_compiler = pytest.mark.skipif(not has_compiler, reason="no C++ compiler is here")
LIBRARIES = ("shared", "gloo") if has_compiler else ("gloo",)
ALL_LIBRARIES = (*LIBRARIES, "nccl")
"""With the one that is pretended in processes of `together`."""


def rank_processes() -> ForkServerContext:
    """Where ranks come from: copies of a process that has loaded the product once."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["banyan.engine.core_process", __name__])
    return context


def together(size: int, folder: Path, work: Work, *arguments: Any) -> list[Any]:
    """What `work(rank, size, address, *arguments)` returns in a process of each rank, or the text
    of what it raises; None of a rank that died."""
    context = rank_processes()
    address = f"file://{folder}/meet"
    ranks, pipes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, work, rank, size, address, *arguments), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(mine)
    answers: list[Any] = []
    for pipe in pipes:
        assert pipe.poll(LIMIT_S), "a rank neither answers nor ends"
        answers.append(None)
        with contextlib.suppress(EOFError):
            answers[-1] = pipe.recv()
    for process in ranks:
        process.join(LIMIT_S)
    return answers


def _run(pipe: Any, work: Work, *arguments: Any) -> None:
    torch.set_num_threads(1)
    pretend_nccl()
    try:
        answer = work(*arguments)
    except Exception as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {error}"
    pipe.send(answer)


def meet(
    name: str,
    rank: int,
    size: int,
    address: str,
    timeout_s: float = 60.0,
    slot_bytes: int = 0,
    threads: int = 1,
) -> Group:
    """Meet over a library by name; `slot_bytes`: of the shared one, 0 = its own."""
    library = Library(cached_library(), threads) if name == "shared" else None
    rendezvous = Rendezvous(rank, size, address, timeout_s, library, slot_bytes=slot_bytes)
    return Group(rank, size, COLLECTIVES.load(name).open(rendezvous))
