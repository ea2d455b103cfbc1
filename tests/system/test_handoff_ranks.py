"""Pairs of servers with different numbers of ranks: pages are cut anew, answers stay the same."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import as_completed
from pathlib import Path

import httpx
import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.models.families import tiny
from tests.support.handoff import CASES, GREEDY, PROMPT, is_whole
from tests.system.handing import FLAGS, WAIT_S, Pair, engines, servers
from tests.system.serving import Server, status_of, wait_until

ALL = bool(os.environ.get("PARALLEL"))
LARGE = 32
TP2, PP2 = {"tp_size": 2}, {"pp_size": 2}
CP2 = {"tp_size": 2, "attn_cp_size": 2}
TP2_CP2 = {"tp_size": 4, "attn_cp_size": 2}
DP2 = {"dp_size": 2}
JOINED = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "engine_mode": "normal"}
JOINED_TP2 = {**JOINED, "tp_size": 4}
LAYOUTS = {
    "tp 1 to 2": ({}, TP2),
    "tp 2 to 1": (TP2, {}),
    "tp 2 to 2": (TP2, TP2),
    "pp 2 to 1": (PP2, {}),
    "pp 1 to 2": ({}, PP2),
    "pp 2 to tp 2": (PP2, TP2),
    "cp 2 to 1": (CP2, {}),
    "tp 2 x cp 2 to 2": (TP2_CP2, TP2),
    "tp 2 to tp 2 x cp 2": (TP2, TP2_CP2),
    "joined 2 to 1": (JOINED, {}),
    "tp 2 to joined 2 x tp 2": (TP2, JOINED_TP2),
}
"""Of prefill, and of decode."""


def output_of(found: dict) -> dict[str, object]:
    meta = found["meta_info"]
    return {"ids": found["output_ids"], "end": meta["finish_reason"]}


@pytest.fixture(scope="module", params=LAYOUTS if ALL else ["pp 2 to tp 2"])
def pair(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Pair]:
    """Their pages are cut by tokens too."""
    prefill, decode = LAYOUTS[request.param]
    first = {**prefill, "chunked_prefill_size": 64, "page_size": LARGE}
    with engines(tiny_model, first, decode) as found:
        yield found


@pytest.mark.parametrize("case", [x for x in CASES if ALL or x != "a schema"])
def test_ranks_that_differ_answer_like_one_server(pair: Pair, single: Engine, case: str) -> None:
    body = {"input_ids": [(x * 5) % 390 + 5 for x in PROMPT], **CASES[case]}
    right, found = single.generate(**body), pair.ask(**body)
    both = (right, found) if isinstance(right, list) else ([right], [found])
    assert [output_of(x) for x in both[1]] == [output_of(x) for x in both[0]]
    wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all pages back")


def test_pages_travel_and_are_not_computed_again(pair: Pair) -> None:
    def computed() -> int:
        (state,) = pair.decode.get_server_info()["internal_states"]
        return state["stats"]["computed_tokens"]

    wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
    before = computed()
    pair.ask(input_ids=[(x * 3) % 390 + 7 for x in PROMPT], sampling_params=GREEDY)
    wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
    assert computed() - before <= 300 % LARGE + 8 + 1


MODELS = {
    "a latent that each rank keeps": ("deepseek v3", {}),
    "layers with a window": ("gemma2", {}),
    "int8 pages": ("", {"kv_cache_dtype": "int8"}),
    "fp8 pages": ("", {"kv_cache_dtype": "fp8_e4m3"}),
    "pages of plain kernels": ("", {"attention_backend": "torch_native"}),
}


@pytest.mark.skipif(not ALL, reason="make test-parallel")
@pytest.mark.parametrize("layout", ["tp 1 to 2", "tp 2 to 1", "cp 2 to 1"])
@pytest.mark.parametrize("kind", MODELS)
def test_pages_of_all_kinds_are_cut_anew(
    kind: str, layout: str, tiny_model: Path, tmp_path: Path
) -> None:
    family, flags = MODELS[kind]
    model = tmp_path / "model" if family else tiny_model
    if family:
        tiny(family, model)
        flags = {**flags, "skip_tokenizer_init": True}
    asked = {"input_ids": [2 + 7 * i % 60 for i in range(100)], "sampling_params": GREEDY}
    with Engine(str(model), **FLAGS, **flags) as alone:
        right = output_of(alone.generate(**asked))
    prefill, decode = LAYOUTS[layout]
    with engines(model, {**prefill, **flags}, {**decode, **flags}) as both:
        assert output_of(both.ask(**asked)) == right
        wait_until(lambda: is_whole(both.prefill) and is_whole(both.decode), WAIT_S, "all back")
        stats = both.decode.get_server_info()["internal_states"][0]["stats"]
        assert stats["computed_tokens"] < 64, "the prompt came, and was not computed"


REPLICAS = {
    "joined 2 to joined 2": (JOINED, JOINED),
    "dp 2 to 1": (DP2, {}),
    "1 to dp 2": ({}, DP2),
    "dp 2 to joined 2": (DP2, JOINED),
    "joined 2 x tp 2 to dp 2": (JOINED_TP2, DP2),
}
"""Of prefill, and of decode."""


def finished(engine: Engine) -> list[int]:
    """By each replica."""
    return [part.stats.finished for part in engine._live().client.replicas()]


@pytest.mark.parametrize("layout", REPLICAS if ALL else ["dp 2 to joined 2"])
def test_replicas_have_rooms_of_their_own(layout: str, tiny_model: Path, single: Engine) -> None:
    """Who gives follows from the room; who takes is free to choose, and finds them all."""
    prompts = [[(x * (i + 2)) % 390 + 5 for x in PROMPT[: 60 + 30 * i]] for i in range(6)]
    right = [single.generate(input_ids=p, sampling_params=GREEDY)["output_ids"] for p in prompts]
    prefill, decode = REPLICAS[layout]
    with engines(tiny_model, {**prefill, "chunked_prefill_size": 64}, decode) as both:
        begun = [both.start(input_ids=p, sampling_params=GREEDY) for p in prompts]
        assert [second.result(WAIT_S)["output_ids"] for _, second in begun] == right
        for engine, flags in ((both.prefill, prefill), (both.decode, decode)):
            each = 6 // flags.get("dp_size", 1)
            wait_until(lambda e=engine, n=each: set(finished(e)) == {n}, WAIT_S, "all replicas")
            wait_until(lambda e=engine: is_whole(e), WAIT_S, "all pages back")
        assert both.decode.stats().computed_tokens < 6 * (16 + 8), "pages came"
        again = both.ask([10**6, 10**6 + 2], input_ids=prompts[:2], sampling_params=GREEDY)
        assert [each["output_ids"] for each in again] == right[:2]
        evenly = [5, 3] if "dp_size" in prefill else [8]
        wait_until(lambda: finished(both.prefill) == evenly, WAIT_S, "even rooms in the first")
        if prefill.get("dp_size") != decode.get("dp_size"):
            return  # both servers get the same
        output_of = {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 1}
        named = both.ask(10**6 + 4, input_ids=prompts[2], sampling_params=GREEDY, **output_of)
        assert named["output_ids"] == right[2]
        wait_until(lambda: finished(both.prefill) == [5, 4], WAIT_S, "the one that was named")
        body = {"input_ids": prompts[2], "sampling_params": GREEDY, **both.meeting()}
        with pytest.raises(BanyanError, match="There are 2 replicas, and none number 7"):
            both.decode.generate(**body, routed_dp_rank=7)
        with pytest.raises(BanyanError, match="it has 2 replicas, and none number 7"):
            both.decode.generate(**body, disagg_prefill_dp_rank=7)


@pytest.mark.skipif(not ALL, reason="make test-parallel")
def test_joined_servers_that_lose_an_engine_hand_over_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    """All replicas of a server end with one, and come again; until then requests end with 503."""
    flags = ("--dp-size", "2", "--tp-size", "2", "--enable-dp-attention")
    with servers(tmp_path, tiny_model, *flags) as pair:

        def ask(at: int) -> httpx.Response:
            """As a router: what one side refuses is not waited for on the other."""
            body = {"input_ids": PROMPT[at:], "sampling_params": GREEDY}
            legs = pair.start("/generate", body)
            first = next(as_completed(legs, WAIT_S)).result()
            return legs[1].result(WAIT_S) if first.status_code == 200 else first

        right = [ask(at).json()["output_ids"] for at in range(4)]
        for side in (pair.prefill, pair.decode):
            before = side.engine_pids()
            os.kill(before[1], signal.SIGKILL)
            assert {ask(at).status_code for at in range(3)} <= {200, 503}

            def is_back(side: Server = side, before: list[int] = before) -> bool:
                is_new = not set(before) & set(side.engine_pids())
                return is_new and status_of(side, "/readyz") == 200

            wait_until(is_back, WAIT_S, "all replicas to be back")
            assert [ask(at).json()["output_ids"] for at in range(4)] == right
