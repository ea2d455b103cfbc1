"""Servers of several nodes on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system.serving import Server, free_port, launch, wait_ready

PROMPTS = [[2 + (i * j * 5 + i) % 390 for i in range(5 + 30 * j)] for j in range(3)]

FEW = ("--threads", "1", "--max-total-tokens", "2048")

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@contextmanager
def node(log: Path, number: int, port: int, model: Path, *flags: str) -> Iterator[Server]:
    """One of two nodes, started and not waited for."""
    server = launch(
        log / f"node{number}.log",
        *("--model-path", str(model), "--tp-size", "2", "--nnodes", "2", *FEW),
        *("--node-rank", str(number), "--dist-init-addr", f"127.0.0.1:{port}", *flags),
    )
    try:
        yield server
    except BaseException:
        print(f"--- node {number}\n{server.tail()}")
        raise
    finally:
        server.kill()


def outputs(server: Server, adapter: str | None = None) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        body = {"input_ids": prompt, "sampling_params": GREEDY, "lora_path": adapter}
        found.append(server.generate(**body)["output_ids"])
    return found


@contextmanager
def over_nodes(log: Path, model: Path, *flags: str) -> Iterator[Server]:
    """A server whose ranks are on two nodes, once it is ready."""
    log.mkdir()
    port = free_port()
    with node(log, 1, port, model, *flags), node(log, 0, port, model, *flags) as first:
        wait_ready(first)
        yield first
