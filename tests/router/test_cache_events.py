"""What a router makes of what workers tell of their caches, and of lengths of prompts."""

from dataclasses import replace

import msgspec
import orjson
import pytest

from banyan.router.cache_events import BadCacheEvents, _reachable, take_batch
from banyan.router.config import PolicyConfig
from banyan.router.forward import question_of
from banyan.router.policies import BucketPolicy, CacheAwarePolicy, RoutingRequest
from banyan.scheduler.routing import CacheAware, Contents, bucket, bucket_bounds, token_keys
from tests.router.fakes import BASE, router, says, specs, until, whole, workers

BLOCK = 4
TOKENS = list(range(100, 120))


def stored(names: list[int], tokens: list[int], parent: int | None = None, **more: object) -> dict:
    found = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent}
    return {**found, "token_ids": tokens, "block_size": BLOCK, **more}


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def held(contents: Contents, tokens: list[int]) -> int:
    return contents.matched(token_keys(tokens, BLOCK))


def test_contents_follow_what_came_and_went() -> None:
    contents = Contents(BLOCK)
    take_batch(batch(stored([1, 2], TOKENS[:8]), stored([3], TOKENS[8:12], 2)), contents)
    assert held(contents, TOKENS) == 12 and held(contents, [9, *TOKENS]) == 0
    assert held(contents, TOKENS[:11]) == 8, "whole units alone"
    take_batch(batch(stored([7], TOKENS[12:16], 99)), contents)
    assert held(contents, TOKENS) == 12, "below one that nobody knows"
    take_batch(batch({"type": "BlockRemoved", "block_hashes": [3, 55]}), contents)
    assert held(contents, TOKENS) == 8
    take_batch(batch(["BlockStored", [3], 2, TOKENS[8:12], BLOCK, None, "GPU"]), contents)
    assert held(contents, TOKENS) == 12, "the older form"
    take_batch(batch(["AllBlocksCleared"]), contents)
    assert held(contents, TOKENS) == 0 and len(contents) == 0


def test_prefixes_of_callers_of_their_own_are_guessed_about() -> None:
    contents = Contents(BLOCK)
    take_batch(batch(stored([1], TOKENS[:4], cache_salt="ab")), contents)
    assert contents.is_of_several and not len(contents)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xc1",
        b"[]",
        msgspec.msgpack.encode([1, 2]),
        batch(5),
        batch(stored([1], [2**40] * 4)),
    ],
)
def test_what_is_no_batch_is_refused(said: bytes) -> None:
    with pytest.raises(BadCacheEvents):
        take_batch(said, Contents(BLOCK))


def test_what_is_held_is_bounded() -> None:
    contents = Contents(BLOCK, most=2)
    contents.stored([1, 2, 3], None, TOKENS[:12])
    assert len(contents) == 2 and held(contents, TOKENS) == 8
    contents.stored([4], None, TOKENS)
    assert len(contents) == 2, "names and tokens that do not match"


class Server:
    """As much of a worker as a policy looks at."""

    def __init__(self, contents: Contents | None) -> None:
        from banyan.scheduler.routing import Prefixes

        self.contents = None if contents is None else [contents]
        self.prefixes = Prefixes(1000)
        self.open = self.taken = 0


def test_a_request_goes_where_its_prefix_is_and_not_where_it_was() -> None:
    first, second = Contents(BLOCK), Contents(BLOCK)
    servers = [Server(first), Server(second)]
    policy, asked = CacheAwarePolicy(PolicyConfig()), RoutingRequest(b"x" * 4096, "", TOKENS)
    was = policy.choose(servers, asked)
    assert was is servers[0] and policy.choose(servers, RoutingRequest(b"x" * 4096)) is was, (
        "a guess"
    )
    second.stored([1, 2, 3, 4], None, TOKENS[:16])
    assert policy.choose(servers, asked) is servers[1]
    second.clear()
    first.stored([1, 2], None, TOKENS[:8])
    assert policy.choose(servers, asked) is servers[0]
    servers[1].contents = None
    assert policy.choose(servers, RoutingRequest(b"x" * 4096, "", [5] * 20)) is servers[1], (
        "its guess"
    )


@pytest.mark.parametrize(
    ("body", "question"),
    [
        (b'{"input_ids": [1, 2]}', [1, 2]),
        (b'{"prompt": [1, 2]}', [1, 2]),
        (b'{"prompt": "one"}', {"prompt": "one"}),
        (b'{"text": "one"}', {"prompt": "one"}),
        (b'{"messages": [{"role": "user"}], "max_tokens": 3}', {"messages": [{"role": "user"}]}),
        (b'{"text": "one", "lora_path": "a"}', None),
        (b'{"input_ids": [[1], [2]]}', None),
        (b"[1]", None),
        (b"{", None),
    ],
)
def test_what_a_worker_is_asked_for_tokens(body: bytes, question: object) -> None:
    assert question_of(body) == question


def test_endpoints_that_mean_every_interface_are_looked_for_at_the_worker() -> None:
    assert _reachable("tcp://*:5557", "http://10.0.0.3:30000", 0) == "tcp://10.0.0.3:5557"
    assert _reachable("tcp://*:5557", "http://[::1]:30000", 2) == "tcp://[::1]:5559"
    assert _reachable("tcp://10.0.0.9:1", "http://a:30000", 0) == "tcp://10.0.0.9:1"
    assert _reachable("ipc:///x", "http://a:30000", 1) == "ipc:///x-1"


def test_lengths_are_parted_so_that_each_server_has_as_much_to_compute() -> None:
    assert bucket_bounds([10] * 90 + [300] * 3, 2) == [10]
    assert bucket_bounds([5, 1, 4, 2, 3, 6], 3) == [3, 5]
    assert bucket_bounds([7], 3) == [7, 7] and bucket_bounds([5, 5], 1) == []
    rule = CacheAware(most_apart=2, most_times=1.5)
    assert [bucket([0, 0, 0], n, [10, 20], rule) for n in (3, 10, 11, 20, 21)] == [0, 0, 1, 1, 2]
    assert bucket([5, 0, 1], 3, [10, 20], rule) == 1, "too unequally busy"
    assert bucket([1, 0], 3, [], rule) == 1, "nothing is known yet"


def test_bucket_keeps_short_prompts_from_long_ones() -> None:
    servers = [Server(None), Server(None)]
    policy = BucketPolicy(PolicyConfig(adjust_s=0.0))
    for length in [50, 60, 70] * 30 + [5000] * 2:
        policy.choose(servers, RoutingRequest(b"x" * length))
    assert policy.choose(servers, RoutingRequest(b"x" * 55)) is servers[0]
    assert policy.choose(servers, RoutingRequest(b"x" * 5000)) is servers[1]


NO_IDS = (2**31, -1, -(2**31) - 1, 2**63, -(2**63), 2**64 - 1)


@pytest.mark.parametrize("wrong", NO_IDS)
@pytest.mark.parametrize("field", ["input_ids", "prompt"])
@pytest.mark.asyncio
async def test_a_prompt_of_ids_that_no_model_has_is_for_the_worker_to_refuse(
    wrong: int, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = whole(b'{"error": {"code": "invalid_request"}}', 400)
    async with workers(says(refusal)) as some, router(specs(some), FOLLOWING) as it:
        await until(lambda: "guessing" in caplog.text)
        it.state.pool.workers[0].contents = [Contents(BLOCK)]
        for ids in ([wrong], TOKENS + [wrong], [wrong] * 20):
            body = orjson.dumps({field: ids})
            answer = await it.http.post("/v1/completions", content=body)
            assert answer.status_code == 400 and answer.content == refusal.split(b"\r\n\r\n")[1]
            assert some[0].requests[-1].body == body


@pytest.mark.parametrize("wrong", NO_IDS)
@pytest.mark.asyncio
async def test_a_worker_that_tells_of_tokens_that_no_model_has_is_not_believed(
    wrong: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = whole(orjson.dumps({"tokens": [*TOKENS, wrong]}))
    async with workers(says(tokens)) as some, router(specs(some), FOLLOWING) as it:
        await until(lambda: "guessing" in caplog.text)
        it.state.pool.workers[0].contents = [Contents(BLOCK)]
        answer = await it.http.post("/v1/completions", json={"prompt": "one two"})
        assert answer.status_code == 200
        assert [r.path for r in some[0].requests[-2:]] == ["/tokenize", "/v1/completions"]


FOLLOWING = replace(BASE, policy=PolicyConfig(follows_events=True))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (b"{}", "publishes no cache events: guessing"),
        (b'{"kv_events": {"block_size": 16}}', "cannot be followed: "),
        (b'{"kv_events": {"endpoint": "nowhere", "block_size": 16}}', "cannot be followed: "),
    ],
)
@pytest.mark.asyncio
async def test_a_server_that_tells_nothing_is_guessed_about_and_that_is_said_once(
    facts: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(says(whole(facts))) as some, router(specs(some), FOLLOWING) as routed:
        await until(lambda: why in caplog.text)
        for _ in range(3):
            answer = await routed.http.post("/generate", json={"text": "one two three"})
            assert answer.status_code == 200
        assert caplog.text.count("guessing") == 1
        asked = [request.path for request in some[0].requests]
        assert asked == ["/get_server_info", *["/generate"] * 3]
