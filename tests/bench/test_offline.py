"""Benchmarks of an engine in this process: one batch, and a whole data set."""

from collections.abc import Callable, Sequence

import pytest

from banyan.base.errors import BanyanError
from banyan.base.ids import RequestId
from banyan.bench import offline
from banyan.bench.datasets import Prompt
from banyan.bench.offline import BatchTimes, results, run_batch, run_throughput
from banyan.messages.events import Event, Failed, Finished, Stats, Tokens
from banyan.messages.requests import Abort, Generate, Message

ONE = b"\0\0\0\0"


class ScriptedLink:
    """A FrontLink whose engine gives every request one token a frame, prompts one after the other.

    Frame n finishes the prefill of request n; until all have a first token, the earlier ones go on.
    """

    dropped = 0

    def __init__(self, refuse: str = "") -> None:
        self.sent: list[Message] = []
        self._refuse = refuse
        self._made: dict[RequestId, int] = {}
        self._limit: dict[RequestId, int] = {}

    def send(self, messages: list[Message]) -> None:
        self.sent += messages
        for message in messages:
            if isinstance(message, Generate):
                self._made[message.request] = 0
                self._limit[message.request] = message.sampling.max_new_tokens

    def receive(self) -> list[Event]:
        events: list[Event] = [Stats(), Tokens(RequestId("someone else"), 0, ONE)]
        if self._refuse:
            return [Failed(next(iter(self._made)), 400, self._refuse)]
        fresh = True
        for request, made in self._made.items():
            if made == self._limit[request] or (made == 0 and not fresh):
                continue
            fresh = fresh and made > 0
            events.append(Tokens(request, made, ONE))
            self._made[request] = made + 1
            if made + 1 == self._limit[request]:
                events.append(Finished(request, "length", 4, made + 1, 0))
        return events

    def listen(self, bell: Callable[[], None] | None) -> None:
        """There is something at any time."""

    def close(self) -> None:
        pass


@pytest.mark.asyncio
async def test_a_batch_has_one_prefill_and_a_latency_for_every_later_step() -> None:
    link = ScriptedLink()
    reported: list[tuple[int, int]] = []
    times = await run_batch(
        link, [[1, 2, 3, 4]] * 3, 5, "x", lambda done, count: reported.append((done, count))
    )
    assert len(times.decode) == 4
    assert sorted(set(reported))[-5:] == [(done, 5) for done in range(1, 6)]
    assert times.prefill > 0 and min(times.decode) >= 0
    asked = [m for m in link.sent if isinstance(m, Generate)]
    assert [a.request for a in asked] == ["x-0", "x-1", "x-2"]
    assert all(a.sampling.ignore_eos and a.sampling.is_greedy for a in asked)
    assert len(asked[0].tokens) == 16


@pytest.mark.asyncio
async def test_an_answer_of_one_token_has_no_decode_steps() -> None:
    times = await run_batch(ScriptedLink(), [[1]], 1, "x")
    assert times.decode == []
    assert "median_decode_latency" not in results("r", 1, 1, 1, times)


@pytest.mark.asyncio
async def test_a_refused_sequence_ends_the_batch_and_takes_the_others_back() -> None:
    link = ScriptedLink(refuse="too long")
    with pytest.raises(BanyanError, match="too long"):
        await run_batch(link, [[1], [2]], 4, "x")
    assert {m.request for m in link.sent if isinstance(m, Abort)} == {"x-0", "x-1"}


@pytest.mark.parametrize(
    ("arrivals", "gaps"),
    [
        ([1.0], []),
        ([1.0, 2.0, 4.0], [1.0, 2.0]),
        ([1.0, 3.0, 3.0, 4.0], [1.0, 1.0, 1.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0]),
    ],
)
def test_steps_that_arrive_together_share_the_time_since_the_last(
    arrivals: Sequence[float], gaps: list[float]
) -> None:
    assert offline._gaps(arrivals) == gaps


def test_steps_that_come_in_halves_of_a_burst_have_its_latency() -> None:
    """Four steps in 80 ms, then four in none: neither is what a step takes."""
    gaps = [0.02] * 4 + [0.0] * 4
    keys = results("default", 2, 100, 33, BatchTimes(0.5, gaps * 4))
    assert keys["median_decode_latency"] == pytest.approx(0.01)


def test_the_median_leaves_out_a_step_that_took_long() -> None:
    keys = results("default", 2, 100, 101, BatchTimes(0.5, [0.01] * 50 + [1.0] + [0.01] * 49))
    assert keys["median_decode_latency"] == pytest.approx(0.01)


def test_the_keys_and_figures_of_a_batch() -> None:
    keys = results("default", 2, 100, 4, BatchTimes(0.5, [0.1, 0.1, 0.4]))
    each = pytest.approx(0.2)
    assert keys == {
        "run_name": "default",
        "batch_size": 2,
        "input_len": 100,
        "output_len": 4,
        "prefill_latency": 0.5,
        "prefill_throughput": 400.0,
        "median_decode_latency": each,
        "median_decode_throughput": pytest.approx(10.0),
        "total_latency": pytest.approx(1.1),
        "overall_throughput": pytest.approx(208 / 1.1),
    }


def test_decode_steps_are_shown_at_the_interval_asked_for() -> None:
    times = BatchTimes(0.5, [0.1] * 6)
    lines = offline.lines(results("r", 2, 100, 7, times), times, every=3)
    assert [line.split(".")[0] for line in lines] == [
        "Prefill", "Decode 0", "Decode 3", "Decode", "Total",
    ]  # fmt: skip


KEYS = {
    "backend", "successful_requests", "total_latency", "total_input_tokens",
    "total_output_tokens", "request_throughput", "input_throughput", "output_throughput",
    "total_throughput",
}  # fmt: skip


def test_every_key_is_there_and_tokens_are_those_that_the_engine_counted() -> None:
    calls: list[list[list[int]]] = []

    def generate(
        ids: list[list[int]], sampling: list[dict[str, object]]
    ) -> list[dict[str, object]]:
        calls.append(ids)
        return [
            {"meta_info": {"prompt_tokens": len(i), "completion_tokens": s["max_new_tokens"]}}
            for i, s in zip(ids, sampling, strict=True)
        ]

    prompts = [Prompt("", [1] * n, n, n + 1) for n in (20, 30)]
    keys = run_throughput(generate, prompts, ignore_eos=True, warm_up=True)
    assert keys.keys() == KEYS
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (50, 52)
    assert keys["successful_requests"] == 2
    assert [len(ids) for ids in calls] == [1, 2]
    assert len(calls[0][0]) == 16
