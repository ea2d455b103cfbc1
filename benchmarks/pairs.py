"""Prefill and decode servers under the load of a trace: `python -m benchmarks.pairs TRACE`.

A trace in Mooncake's form is played through a router to two prefill and two decode servers of a
tiny model, with all its lengths made shorter. Every answer is looked at token by token: what its
counters tell must have come, once, and be what one server alone answers. Then `banyan simulate`
plays the same requests on the same layout, with the figures of a step as this machine gives them,
and how far it is off is told.
"""

import argparse
import asyncio
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import orjson

from banyan.bench.http import Server
from banyan.bench.metrics import percentile
from banyan.bench.probe import probe
from banyan.config.cli import parse
from banyan.config.defaults import settle
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig
from banyan.platform import open_platform
from banyan.sim.hardware import Hardware
from banyan.sim.layout import ParallelLayout
from banyan.sim.study import StudyQuestion, study
from banyan.sim.workload import MOONCAKE_BLOCK, Arrival
from benchmarks.pair_site import VOCAB, Told, alone, ask, flags_of, load_average, pairs, write_model

PREFILL = DECODE = 2
_AT_ONCE = 4
"""Requests to the server that checks answers."""
_PROMPT, _OUTPUT = 2048, 200
"""Lengths by which the time of a step is measured."""
_REPEATS = 5


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


async def play(url: str, arrivals: Sequence[Arrival]) -> tuple[list[Told], float]:
    """Send each request at its time; the answers, and how late one was sent at most."""
    server = Server(url)
    began_s, late_s = time.perf_counter(), 0.0
    tasks: list[asyncio.Task[Told]] = []
    for arrival in arrivals:
        wait_s = began_s + arrival.at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        late_s = max(late_s, time.perf_counter() - began_s - arrival.at_s)
        tasks.append(asyncio.create_task(ask(server, prompt_of(arrival), arrival.output_len)))
    told = list(await asyncio.gather(*tasks))
    server.close()
    return told, late_s


async def others(url: str, arrivals: Sequence[Arrival], told: Sequence[Told], most: int) -> int:
    """Of up to `most` answers, those that are not what this server answers."""
    server, gate = Server(url), asyncio.Semaphore(_AT_ONCE)
    step = max(1, -(-len(arrivals) // most))

    async def differs(at: int) -> bool:
        async with gate:
            right = await ask(server, prompt_of(arrivals[at]), arrivals[at].output_len)
            return right.tokens != told[at].tokens

    found = await asyncio.gather(*(differs(at) for at in range(0, len(arrivals), step)))
    server.close()
    print(f"compared with one server: {len(found)} answers, {sum(found)} differ")
    return sum(found)


async def step_times(url: str) -> tuple[float, float]:
    """Seconds of a step of one row, and of a whole prompt, on a quiet server."""
    server, lots = Server(url), Random(7)
    gaps: list[float] = []
    prompts_s: list[float] = []
    for _ in range(_REPEATS):
        prompt = [lots.randrange(5, VOCAB) for _ in range(_PROMPT)]
        told = await ask(server, prompt, _OUTPUT)
        gaps.append((told.at_s[-1] - told.at_s[0]) / (_OUTPUT - 1))
        prompts_s.append(told.at_s[0] - told.asked_s)
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
    told = study(
        StudyQuestion(config=config, model_config=model_config, hardware=guess, arrivals=[whole]),
        ParallelLayout(),
    )
    assert told.report is not None
    steps = -(-_PROMPT // max(1, schedule.chunk_tokens))
    paper_s = told.report.ttft.p50 - steps * row_s
    left_s = max(1e-6, prompt_s - steps * row_s)
    flops = guess.flops_per_s * paper_s / left_s
    return Hardware(
        memory_gib=4.0, bytes_per_s=machine.read_bytes_s, flops_per_s=flops, overhead_s=row_s
    )


def tell(told: Sequence[Told], arrivals: Sequence[Arrival], began_s: float) -> Measured:
    failed = sum(one.status != 200 for one in told)
    lost, twice = sum(one.lost for one in told), sum(one.twice for one in told)
    tokens = sum(len(one.tokens) for one in told)
    end_s = max((one.at_s[-1] for one in told if one.at_s), default=began_s)
    found = Measured(
        end_s - began_s,
        tokens,
        [one.at_s[0] - one.asked_s for one in told if one.at_s],
        [gap for one in told for gap in one.gaps_s],
        [one.at_s[-1] - one.asked_s for one in told if one.at_s],
    )
    prompts = sum(len(arrival.prompt) // 4 for arrival in arrivals)
    print(
        f"requests {len(told)}, failed {failed}; prompt tokens {prompts:,}, output tokens "
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
            told, late_s = asyncio.run(play(url, arrivals))
        found = tell(told, arrivals, began_s)
        print(f"sent {late_s * 1e3:.0f} ms late at most; load behind: {load_average()}")
        environment = read_environment()
        config, model_config = prepare(parse(flags_of(model), environment), environment)
        config, _ = settle(config, open_platform("cpu").defaults(model_config))
        with alone(model, folder, 1) as url:
            row_s, prompt_s = asyncio.run(step_times(url))
            asyncio.run(others(url, arrivals, told, given.checked))
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
