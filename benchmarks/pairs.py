"""Prefill and decode servers under the load of a trace: `python -m benchmarks.pairs TRACE`.

A trace in Mooncake's form is played through a router to two prefill and two decode servers of a
tiny model, with all its lengths made shorter. Every answer is checked token by token: each
counted token must arrive once, and equal the answer of a single server. Then `banyan simulate`
plays the same requests on the same layout, with step times measured on this machine, and the error
of the simulation is printed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import orjson

from banyan.bench.http import HttpClient
from banyan.bench.report import percentile
from banyan.bench.roofline import probe
from banyan.config.cli import parse
from banyan.config.defaults import settle
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig
from banyan.platform import open_platform
from banyan.sim.layout import Hardware, ParallelLayout
from banyan.sim.study import StudyQuestion, study
from banyan.sim.workload import MOONCAKE_BLOCK, Arrival

VOCAB = 2048
CONTEXT = 16384
MODEL_CONFIG = {
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
PREFILL = DECODE = 2
_AT_ONCE = 4
"""Requests to the server that checks answers."""
_PROMPT, _OUTPUT = 2048, 200
"""Lengths by which the time of a step is measured."""
_REPEATS = 5


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
class TimedAnswer:
    """One answer, token by token.

    Attributes:
        at_s: arrival of each token, perf_counter seconds.
        lost: tokens that were counted but did not arrive.
        twice: tokens that arrived but were not counted.
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


@dataclass(frozen=True)
class Measured:
    """What clients saw, in seconds."""

    seconds: float
    tokens: int
    ttft: list[float]
    gaps: list[float]
    whole: list[float]


def arrivals_of(path: str, shorter: int, seconds: float, speed: float) -> Iterator[Arrival]:
    """The beginning of a trace: equal blocks become equal tokens."""
    block = MOONCAKE_BLOCK // shorter
    with open(path, "rb") as lines:
        for line in lines:
            entry = orjson.loads(line)
            at_s = entry["timestamp"] / 1000 / speed
            if at_s > seconds:
                return
            tokens = array("i")
            for name in entry["hash_ids"]:
                lots = Random(name)
                tokens.extend(lots.randrange(5, VOCAB) for _ in range(block))
            length = max(1, min(len(tokens), entry["input_length"] // shorter))
            output = max(1, entry["output_length"] // shorter)
            yield Arrival(at_s, tokens[:length].tobytes(), output)


def prompt_of(arrival: Arrival) -> list[int]:
    return array("i", arrival.prompt).tolist()


async def play(url: str, arrivals: Sequence[Arrival]) -> tuple[list[TimedAnswer], float]:
    """Send each request at its time; the answers, and how late one was sent at most."""
    server = HttpClient(url)
    began_s, late_s = time.perf_counter(), 0.0
    tasks: list[asyncio.Task[TimedAnswer]] = []
    for arrival in arrivals:
        wait_s = began_s + arrival.at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        late_s = max(late_s, time.perf_counter() - began_s - arrival.at_s)
        tasks.append(asyncio.create_task(ask(server, prompt_of(arrival), arrival.output_len)))
    answers = list(await asyncio.gather(*tasks))
    server.close()
    return answers, late_s


async def others(
    url: str, arrivals: Sequence[Arrival], answers: Sequence[TimedAnswer], most: int
) -> int:
    """Of up to `most` answers, those that are not what this server answers."""
    server, gate = HttpClient(url), asyncio.Semaphore(_AT_ONCE)
    step = max(1, -(-len(arrivals) // most))

    async def differs(at: int) -> bool:
        async with gate:
            right = await ask(server, prompt_of(arrivals[at]), arrivals[at].output_len)
            return right.tokens != answers[at].tokens

    found = await asyncio.gather(*(differs(at) for at in range(0, len(arrivals), step)))
    server.close()
    print(f"compared with one server: {len(found)} answers, {sum(found)} differ")
    return sum(found)


async def step_times(url: str) -> tuple[float, float]:
    """Seconds of a step of one row, and of a whole prompt, on a quiet server."""
    server, lots = HttpClient(url), Random(7)
    gaps: list[float] = []
    prompts_s: list[float] = []
    for _ in range(_REPEATS):
        prompt = [lots.randrange(5, VOCAB) for _ in range(_PROMPT)]
        answer = await ask(server, prompt, _OUTPUT)
        gaps.append((answer.at_s[-1] - answer.at_s[0]) / (_OUTPUT - 1))
        prompts_s.append(answer.at_s[0] - answer.asked_s)
    server.close()
    return percentile(gaps, 50), percentile(prompts_s, 50)


def hardware_of(
    config: Config, model_config: ModelConfig, row_s: float, prompt_s: float
) -> Hardware:
    """Figures with which the roofline gives the steps that were measured."""
    machine = probe()
    guess = Hardware(
        memory_gib=4.0,
        bytes_per_s=machine.read_bytes_s,
        flops_per_s=machine.fp32_ops_s,
        overhead_s=row_s,
    )
    schedule = config.schedule
    whole = Arrival(0.0, array("i", [5] * _PROMPT).tobytes(), 1)
    simulated = study(
        StudyQuestion(config=config, model_config=model_config, hardware=guess, arrivals=[whole]),
        ParallelLayout(),
    )
    assert simulated.report is not None
    steps = -(-_PROMPT // max(1, schedule.chunk_tokens))
    paper_s = simulated.report.ttft.p50 - steps * row_s
    left_s = max(1e-6, prompt_s - steps * row_s)
    flops = guess.flops_per_s * paper_s / left_s
    return Hardware(
        memory_gib=4.0, bytes_per_s=machine.read_bytes_s, flops_per_s=flops, overhead_s=row_s
    )


def summarize(
    answers: Sequence[TimedAnswer], arrivals: Sequence[Arrival], began_s: float
) -> Measured:
    failed = sum(one.status != 200 for one in answers)
    lost, twice = sum(one.lost for one in answers), sum(one.twice for one in answers)
    tokens = sum(len(one.tokens) for one in answers)
    end_s = max((one.at_s[-1] for one in answers if one.at_s), default=began_s)
    found = Measured(
        end_s - began_s,
        tokens,
        [one.at_s[0] - one.asked_s for one in answers if one.at_s],
        [gap for one in answers for gap in one.gaps_s],
        [one.at_s[-1] - one.asked_s for one in answers if one.at_s],
    )
    prompts = sum(len(arrival.prompt) // 4 for arrival in arrivals)
    print(
        f"requests {len(answers)}, failed {failed}; prompt tokens {prompts:,}, output tokens "
        f"{tokens:,}: lost {lost}, duplicated {twice}"
    )
    return found


def compare(found: Measured, question: StudyQuestion) -> None:
    """A line for each figure, measured and simulated."""
    report = study(question, ParallelLayout(prefill=PREFILL, decode=DECODE)).report
    assert report is not None
    rows = (
        ("tokens/s", found.tokens / found.seconds, report.tokens_per_s, 1.0),
        ("ttft p50 ms", percentile(found.ttft, 50), report.ttft.p50, 1e3),
        ("ttft p99 ms", percentile(found.ttft, 99), report.ttft.p99, 1e3),
        ("itl mean ms", sum(found.gaps) / max(1, len(found.gaps)), report.itl.mean, 1e3),
        ("itl p99 ms", percentile(found.gaps, 99), report.itl.p99, 1e3),
        ("whole p50 ms", percentile(found.whole, 50), report.e2e.p50, 1e3),
        ("whole p99 ms", percentile(found.whole, 99), report.e2e.p99, 1e3),
    )
    print(f"\n{'':12}{'measured':>12}{'simulated':>12}{'error':>9}")
    for name, here, there, unit in rows:
        error = (there - here) / here if here else 0.0
        print(f"{name:12}{here * unit:12.2f}{there * unit:12.2f}{error:9.0%}")


def write_model(folder: Path) -> Path:
    """A model folder without weights: they are drawn by lot, the same for everybody."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
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
    with _running([Process(free_port(), words, folder / "alone.log")]) as (url,):
        yield url


@contextlib.contextmanager
def pairs(model: Path, folder: Path, prefill: int, decode: int) -> Iterator[str]:
    """Servers of one thread each workers a router, whose address it is."""
    ports = [free_port() for _ in range(prefill)]
    one = flags_of(model, "--threads", "1")
    processes: list[Process] = []
    workers: list[str] = []
    for at in range(prefill + decode):
        role = ["--disaggregation-mode", "prefill" if at < prefill else "decode"]
        if at < prefill:
            role += ["--disaggregation-bootstrap-port", str(ports[at])]
        words = ["banyan.launch_server", *one, *role]
        processes.append(Process(free_port(), words, folder / f"server{at}.log"))
        url = processes[-1].url
        workers += ["--prefill", url, str(ports[at])] if at < prefill else ["--decode", url]
    words = ["banyan.launch_router", "--pd-disaggregation", "--policy", "round_robin", *workers]
    words += ["--log-level", "warning", "--worker-startup-check-interval", "0.2"]
    processes.append(Process(free_port(), words, folder / "router.log"))
    with _running(processes) as urls:
        yield urls[-1]


@contextlib.contextmanager
def _running(processes: Sequence[Process]) -> Iterator[list[str]]:
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


async def ask(server: HttpClient, prompt: Sequence[int], count: int) -> TimedAnswer:
    """One greedy stream of so many tokens."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    reply = await server.request("POST", "/generate", orjson.dumps(body), timeout_s=300.0)
    answer = TimedAnswer(reply.started, status=reply.status)
    rest = b""
    for at_s, piece in reply.pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                _add_event(answer, orjson.loads(event[6:]), at_s)
    answer.lost += max(0, count - len(answer.tokens))
    return answer


def _add_event(answer: TimedAnswer, event: dict[str, object], at_s: float) -> None:
    meta, tokens = event.get("meta_info"), event.get("output_ids")
    if not isinstance(meta, dict) or not isinstance(tokens, list):
        answer.status = 503
        return
    answer.tokens += tokens
    answer.at_s += [at_s] * len(tokens)
    counted = meta["completion_tokens"]
    answer.lost = max(answer.lost, counted - len(answer.tokens))
    answer.twice = max(answer.twice, len(answer.tokens) - counted)


def load_average() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", help="JSON lines in Mooncake's form")
    parser.add_argument("--seconds", type=float, default=120.0, help="at most 600")
    parser.add_argument("--shorter", type=int, default=16, help="lengths are divided by so much")
    parser.add_argument("--speed", type=float, default=1.0, help="times faster than recorded")
    parser.add_argument("--checked", type=int, default=200, help="answers asked for once more")
    given = parser.parse_args()
    arrivals = list(arrivals_of(given.trace, given.shorter, min(600.0, given.seconds), given.speed))
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = write_model(folder / "model")
        print(
            f"{len(arrivals)} requests in {given.seconds:g} s, lengths / {given.shorter}, through "
            f"a router to {PREFILL} prefill and {DECODE} decode servers; load before: "
            f"{load_average()}"
        )
        with pairs(model, folder, PREFILL, DECODE) as url:
            began_s = time.perf_counter()
            answers, late_s = asyncio.run(play(url, arrivals))
        found = summarize(answers, arrivals, began_s)
        print(f"sent {late_s * 1e3:.0f} ms late at most; load after: {load_average()}")
        environment = read_environment()
        config, model_config = prepare(parse(flags_of(model), environment), environment)
        config, _ = settle(config, open_platform("cpu").defaults(model_config))
        with alone(model, folder, 1) as url:
            row_s, prompt_s = asyncio.run(step_times(url))
            asyncio.run(others(url, arrivals, answers, given.checked))
    print(
        f"one thread, alone: {row_s * 1e3:.2f} ms for a token, {prompt_s * 1e3:.0f} ms for a "
        f"prompt of {_PROMPT:,}"
    )
    hardware = hardware_of(config, model_config, row_s, prompt_s)
    compare(
        found,
        StudyQuestion(
            config=config, model_config=model_config, hardware=hardware, arrivals=arrivals
        ),
    )


if __name__ == "__main__":
    main()
