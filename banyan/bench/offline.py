"""Benchmarks of an engine in this process, without HTTP.

`run_batch` (`banyan bench batch`) runs one static batch. The latency of a decode step is the time
between the tokens of consecutive steps as they leave the engine, so planning that overlaps with
execution costs nothing. An engine may send the tokens of several steps together, so the median is
taken over means of neighbouring steps. `run_throughput` (`banyan bench throughput`) runs a whole
data set at once.
"""

import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from banyan.base.errors import BanyanError
from banyan.base.ids import RequestId
from banyan.bench.datasets import Prompt
from banyan.messages.events import Failed, Finished, Ready, Tokens
from banyan.messages.requests import Abort, Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.messages.transport import FrontLink, next_events

_NEIGHBOURS = 16
"""Steps over which gaps are averaged: about two groups of multi-step decoding."""


@dataclass(frozen=True)
class BatchTimes:
    """Times of a batch, in seconds.

    Attributes:
        prefill: time until every sequence had its first token.
        decode: time of each later step.
    """

    prefill: float
    decode: list[float]

    @property
    def total(self) -> float:
        return self.prefill + sum(self.decode)


async def wait_ready(link: FrontLink) -> Ready:
    """Wait for the engine's Ready event. The engine handle reports its death."""
    while True:
        for event in await next_events(link):
            if isinstance(event, Ready):
                return event


async def run_batch(
    link: FrontLink,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    name: str,
    progress: Callable[[int, int], None] = lambda done, count: None,
    adapters: Sequence[str] = (),
) -> BatchTimes:
    """Send all prompts at once and follow their tokens; each answer has `output_len` of them.

    Args:
        progress: called with the tokens that each sequence has, and their final number.
        adapters: adapter name of each prompt, or () for none.

    Raises:
        BanyanError: a sequence failed; the others are aborted.
    """
    sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
    asked = [
        Generate(
            request=RequestId(f"{name}-{number}"),
            tokens=array("i", prompt).tobytes(),
            sampling=sampling,
            adapter=adapters[number] if adapters else "",
        )
        for number, prompt in enumerate(prompts)
    ]
    made = {generate.request: 0 for generate in asked}
    open_requests = set(made)
    times: list[float] = []
    began = time.perf_counter()
    link.send(list(asked))
    while open_requests:
        for event in await next_events(link):
            if isinstance(event, Tokens) and event.request in made:
                made[event.request] += len(event.tokens) // 4
            elif isinstance(event, Finished):
                open_requests.discard(event.request)
            elif isinstance(event, Failed) and event.request in made:
                link.send([Abort(request) for request in open_requests])
                raise BanyanError(f"the engine refused a sequence of the batch: {event.text}")
        now = time.perf_counter()
        slowest = min(made.values())
        # Steps that arrive in one frame share the time since the last.
        times += [now] * (slowest - len(times))
        progress(slowest, output_len)
    return BatchTimes(times[0] - began, _gaps(times))


def _gaps(times: Sequence[float]) -> list[float]:
    """Gaps between arrivals; equal arrivals share the gap before them evenly."""
    gaps: list[float] = []
    first = 0
    while first + 1 < len(times):
        last = first + 1
        while last + 1 < len(times) and times[last + 1] == times[last]:
            last += 1
        gaps += [(times[last] - times[first]) / (last - first)] * (last - first)
        first = last
    return gaps


def _means(gaps: Sequence[float]) -> list[float]:
    """Means of every `_NEIGHBOURS` consecutive gaps, or of all if there are fewer."""
    count = min(_NEIGHBOURS, len(gaps))
    return [statistics.fmean(gaps[i : i + count]) for i in range(len(gaps) - count + 1)]


def results(
    run_name: str, batch_size: int, input_len: int, output_len: int, times: BatchTimes
) -> dict[str, object]:
    """The figures under the keys of bench_one_batch."""
    total = times.total
    keys: dict[str, object] = {
        "run_name": run_name,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": times.prefill,
        "prefill_throughput": batch_size * input_len / times.prefill,
        "total_latency": total,
        "overall_throughput": batch_size * (input_len + output_len) / total,
    }
    if times.decode:
        median = statistics.median(_means(times.decode))
        keys["median_decode_latency"] = median
        keys["median_decode_throughput"] = batch_size / median
    return keys


def lines(keys: dict[str, object], times: BatchTimes, every: int) -> list[str]:
    """The figures as text lines, with every n-th decode step if `every` is not 0."""
    batch_size = keys["batch_size"]
    assert isinstance(batch_size, int)
    found = [
        f"Prefill. latency: {times.prefill:.5f} s, "
        f"throughput: {keys['prefill_throughput']:.2f} token/s"
    ]
    found += [
        f"Decode {number}. Batch size: {batch_size}, latency: {seconds:.5f} s, "
        f"throughput: {batch_size / seconds:.2f} token/s"
        for number, seconds in enumerate(times.decode)
        if every and number % every == 0
    ]
    if times.decode:
        found.append(
            f"Decode.  median latency: {keys['median_decode_latency']:.5f} s, "
            f"median throughput: {keys['median_decode_throughput']:.2f} token/s"
        )
    found.append(
        f"Total. latency: {times.total:.3f} s, throughput: {keys['overall_throughput']:.2f} token/s"
    )
    return found


GenerateAll = Callable[[list[list[int]], list[dict[str, object]]], Sequence[dict[str, object]]]
"""(prompts as token ids, sampling parameters of each) -> native answers."""

_WARM_LEN = 16


def run_throughput(
    generate: GenerateAll, prompts: Sequence[Prompt], ignore_eos: bool, warm_up: bool
) -> dict[str, object]:
    """The figures under the keys of bench_offline_throughput."""
    ids = [prompt.ids for prompt in prompts]
    known = [i for i in ids if i is not None]
    assert len(known) == len(prompts), "prompts without token ids"
    sampling: list[dict[str, object]] = [
        {"temperature": 0, "max_new_tokens": p.output_len, "ignore_eos": ignore_eos}
        for p in prompts
    ]
    if warm_up:
        generate([known[0][:_WARM_LEN]], [{"temperature": 0, "max_new_tokens": 2}])
    began = time.perf_counter()
    answers = generate(known, sampling)
    seconds = time.perf_counter() - began
    meta = [answer["meta_info"] for answer in answers]
    inputs = sum(m["prompt_tokens"] for m in meta if isinstance(m, dict))
    outputs = sum(m["completion_tokens"] for m in meta if isinstance(m, dict))
    return {
        "backend": "engine",
        "successful_requests": len(answers),
        "total_latency": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answers) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
    }
