"""Servers for the benchmarks of pairs: prefill and decode servers behind a router, or one server
that does both, all of them on one tiny model that is made here and has weights drawn by lot.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson

from banyan.bench.http import Server

VOCAB = 2048
CONTEXT = 16384
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
_START_S = 90.0


@dataclass
class Process:
    """One server and what it is started with."""

    port: int
    words: Sequence[str]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Told:
    """One answer, token by token.

    Attributes:
        at_s: when each token came, perf_counter seconds.
        lost: tokens that its counters tell of and that did not come.
        twice: tokens that came beyond those.
    """

    asked_s: float
    tokens: list[int] = field(default_factory=list[int])
    at_s: list[float] = field(default_factory=list[float])
    lost: int = 0
    twice: int = 0
    status: int = 200

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)]


def write_model(folder: Path) -> Path:
    """A model folder without weights: they are drawn by lot, the same for everybody."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def flags_of(model: Path, *more: str) -> list[str]:
    return [
        *("--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--max-total-tokens", "65536", "--random-seed", "1", "--log-level", "warning"),
        *("--incremental-streaming-output", *more),
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def alone(model: Path, folder: Path, threads: int) -> Iterator[str]:
    """One server that does both; its address."""
    words = ["banyan.launch_server", *flags_of(model, "--threads", str(threads))]
    with _started([Process(free_port(), words, folder / "alone.log")]) as (url,):
        yield url


@contextlib.contextmanager
def pairs(model: Path, folder: Path, prefill: int, decode: int) -> Iterator[str]:
    """Servers of one thread each behind a router, whose address it is."""
    rooms = [free_port() for _ in range(prefill)]
    one = flags_of(model, "--threads", "1")
    processes: list[Process] = []
    behind: list[str] = []
    for at in range(prefill + decode):
        role = ["--disaggregation-mode", "prefill" if at < prefill else "decode"]
        if at < prefill:
            role += ["--disaggregation-bootstrap-port", str(rooms[at])]
        words = ["banyan.launch_server", *one, *role]
        processes.append(Process(free_port(), words, folder / f"server{at}.log"))
        url = processes[-1].url
        behind += ["--prefill", url, str(rooms[at])] if at < prefill else ["--decode", url]
    words = ["banyan.launch_router", "--pd-disaggregation", "--policy", "round_robin", *behind]
    words += ["--log-level", "warning", "--worker-startup-check-interval", "0.2"]
    processes.append(Process(free_port(), words, folder / "router.log"))
    with _started(processes) as urls:
        yield urls[-1]


@contextlib.contextmanager
def _started(processes: Sequence[Process]) -> Iterator[list[str]]:
    running: list[subprocess.Popen[bytes]] = []
    try:
        for one in processes:
            command = [sys.executable, "-m", *one.words, "--port", str(one.port)]
            with one.log.open("wb") as out:
                running.append(
                    subprocess.Popen(
                        command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        for one in processes:
            _wait_for(one)
        yield [one.url for one in processes]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(one: Process) -> None:
    until = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(one.url + "/readyz").status_code == 200:
                return
        if time.monotonic() > until:
            tail = one.log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{one.words[0]} was not ready within {_START_S:g} s\n{tail}")
        time.sleep(0.1)


async def ask(server: Server, prompt: Sequence[int], count: int) -> Told:
    """One greedy stream of so many tokens."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    reply = await server.request("POST", "/generate", orjson.dumps(body), timeout_s=300.0)
    told = Told(reply.started, status=reply.status)
    rest = b""
    for at_s, piece in reply.pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                _take(told, orjson.loads(event[6:]), at_s)
    told.lost += max(0, count - len(told.tokens))
    return told


def _take(told: Told, event: dict[str, object], at_s: float) -> None:
    meta, tokens = event.get("meta_info"), event.get("output_ids")
    if not isinstance(meta, dict) or not isinstance(tokens, list):
        told.status = 503
        return
    told.tokens += tokens
    told.at_s += [at_s] * len(tokens)
    counted = meta["completion_tokens"]
    told.lost = max(told.lost, counted - len(told.tokens))
    told.twice = max(told.twice, len(told.tokens) - counted)


def load_average() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())
