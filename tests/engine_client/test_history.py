"""The latest ended requests and the load of the last hour."""

import asyncio
from dataclasses import replace

from msgspec import structs

from banyan.base.ids import RequestId
from banyan.engine_client.client import Replica
from banyan.engine_client.data_parallel import NUM_SAMPLES, LoadHistory
from banyan.engine_client.metrics_observer import RequestOutcome
from banyan.engine_client.request_log import MAX_ENDED, EndedRequests
from banyan.messages.events import Ready, Stats
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import Usage
from banyan.requests.request_spec import RequestSpec, spec_of

READY = Ready(max_total_tokens=1000, max_request_tokens=100, max_running=8)


def request(name: str, caller: bytes = b"") -> RequestSpec:
    spec = spec_of(RequestId(name), [1, 2, 3], SamplingParams(max_new_tokens=4))
    return replace(spec, message=structs.replace(spec.message, caller=caller))


def test_an_ended_request_has_its_phases_and_only_its_caller_sees_it() -> None:
    ended = EndedRequests()
    usage = Usage(3, 5, cached_tokens=2, queue_s=0.25)
    ended.ended(RequestOutcome(request("a", b"one"), usage, "stop", 2.0, first_s=1.0))
    ended.ended(RequestOutcome(request("b", b"two"), None, "queue_full", 0.5))
    newest, oldest = ended.rows(None)
    assert (newest["rid"], newest["reason"], newest["prefill_s"]) == ("b", "queue_full", None)
    phases = [oldest[name] for name in ("queue_s", "prefill_s", "decode_s", "seconds")]
    assert phases == [0.25, 0.75, 1.0, 2.0]
    assert (oldest["prompt_tokens"], oldest["cached_tokens"], oldest["output_tokens"]) == (3, 2, 5)
    assert [row["rid"] for row in ended.rows(b"one")] == ["a"]
    assert ended.rows(b"") == []


def test_only_the_latest_ended_requests_are_kept() -> None:
    ended = EndedRequests()
    for number in range(MAX_ENDED + 5):
        ended.ended(RequestOutcome(request(str(number)), Usage(3, 1), "stop", 1.0, 0.5))
    rows = ended.rows(None)
    assert len(rows) == MAX_ENDED and rows[0]["rid"] == str(MAX_ENDED + 4)


def test_a_sample_sums_living_replicas_and_an_hour_is_kept() -> None:
    history = LoadHistory(page_size=16)
    stats = Stats(running=2, waiting=1, held_pages=3, cached_pages=5, output_tokens=7, steps=4)
    replicas = [
        Replica(0, True, READY, stats),
        Replica(1, True, READY, stats),
        Replica(2, False, READY, stats),
    ]
    for number in range(NUM_SAMPLES + 3):
        history.sample(replicas, float(number))
    samples = history.samples()
    assert len(samples) == NUM_SAMPLES and samples[0]["at"] == 3.0
    assert samples[-1] == {
        **{"at": NUM_SAMPLES + 2.0, "running": 4, "waiting": 2, "used": 96, "kept": 256},
        **{"most": 2000, "output_tokens": 14, "prompt_tokens": 0, "cached_tokens": 0, "steps": 8},
    }


def test_sampling_begins_at_once_and_stops() -> None:
    async def run() -> LoadHistory:
        history = LoadHistory(page_size=16)
        history.start(lambda: [Replica(0, True, READY, Stats(running=1))])
        history.stop()
        history.stop()
        return history

    assert [sample["running"] for sample in asyncio.run(run()).samples()] == [1]
