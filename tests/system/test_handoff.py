"""Two servers share the work: one computes prompts, the other one continues them."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError, ConfigError
from banyan.llm import Engine
from tests.models.families import tiny
from tests.support.handoff import CASES, GREEDY, PROMPT, is_whole, output_of
from tests.support.port_scan import ports_of, scanned
from tests.system.handing import (
    FLAGS,
    WAIT_S,
    Pair,
    Proxy,
    Servers,
    engines,
    fresh_room,
    servers,
)
from tests.system.serving import wait_until

ROLES = ("prefill", "decode")
ALL = bool(os.environ.get("PARALLEL"))


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Pair]:
    with engines(tiny_model, {"chunked_prefill_size": 64}) as found:
        yield found


def open_rooms(engine: Engine) -> int:
    (state,) = engine.get_server_info()["internal_states"]
    return state["stats"]["open_rooms"]


@pytest.mark.parametrize("length", [3, 16, 33, 64, 300])
@pytest.mark.parametrize("case", CASES)
def test_a_pair_answers_like_one_server(pair: Pair, single: Engine, case: str, length: int) -> None:
    prompt = [(x + length) % 390 + 5 for x in PROMPT[:length]]
    body = {"input_ids": prompt, **CASES[case]}
    right, found = single.generate(**body), pair.ask(**body)
    if isinstance(right, list):
        assert [output_of(x) for x in found] == [output_of(x) for x in right]
    else:
        assert output_of(found) == output_of(right)
        assert found["meta_info"]["cached_tokens"] <= length


def test_a_batch_brings_a_list_of_rooms(pair: Pair, single: Engine) -> None:
    body = {"input_ids": [PROMPT[:40], PROMPT[:90]], "sampling_params": GREEDY}
    found = pair.ask([fresh_room(), fresh_room()], **body)
    assert [output_of(x) for x in found] == [output_of(x) for x in single.generate(**body)]
    with pytest.raises(BanyanError, match="another number for each prompt"):
        pair.decode.generate(**body, **pair.meeting([5, 5]))
    with pytest.raises(BanyanError, match="must be a list of 2 numbers"):
        pair.decode.generate(**body, **pair.meeting(5))


def test_prefixes_that_either_side_has_cached_change_no_answer(pair: Pair, single: Engine) -> None:
    prompt = [x % 390 + 6 for x in PROMPT]
    body = {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True}
    right = output_of(single.generate(**body))
    first, second = pair.ask(**body), pair.ask(**body)
    assert output_of(first) == output_of(second) == right
    assert first["meta_info"]["cached_tokens"] == 0, "of the side that computed it"
    assert second["meta_info"]["cached_tokens"] == 299
    pair.decode.flush_cache()
    assert output_of(pair.ask(**body)) == right
    pair.prefill.flush_cache()
    assert output_of(pair.ask(**body)) == right
    wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all pages back")


@pytest.mark.parametrize("side", ["prefill", "decode", "both"] if ALL else ["both"])
def test_sides_that_share_no_prefixes_hand_over_all_the_same(
    side: str, tiny_model: Path, single: Engine
) -> None:
    """By a prefix that is one request's own, also when it is retracted and comes again."""
    prompts = [PROMPT[: 90 + 20 * i] for i in range(4)]  # one begins like the other
    params = {**GREEDY, "max_new_tokens": 40}
    right = [single.generate(input_ids=p, sampling_params=params)["output_ids"] for p in prompts]
    alone = {"disable_radix_cache": True}
    flags = {"max_total_tokens": 512, "schedule_conservativeness": 0.1}
    sides = [{**flags, **alone} if side in (which, "both") else flags for which in ROLES]
    with engines(tiny_model, *sides) as both:
        for _ in range(2):
            begun = [both.start(input_ids=p, sampling_params=params) for p in prompts]
            found = [second.result(WAIT_S) for _, second in begun]
            assert [each["output_ids"] for each in found] == right
        cached = [each["meta_info"]["cached_tokens"] for each in found]
        assert any(cached) == (side == "decode"), "of the side that computes prompts"
        stats = both.decode.stats()
        whole = 2 * sum(map(len, prompts))
        assert stats.computed_tokens < whole + stats.retractions * 200, "pages came"
        wait_until(lambda: is_whole(both.prefill) and is_whole(both.decode), WAIT_S, "all back")


def test_many_at_once_in_a_small_cache_answer_alike(tiny_model: Path, single: Engine) -> None:
    """The decode side has room for few of them: requests wait, and some are retracted."""
    params = {**GREEDY, "max_new_tokens": 60}
    prompts = [[(x * (i + 2)) % 390 + 5 for x in PROMPT[: 60 + 7 * i]] for i in range(8)]
    right = [single.generate(input_ids=p, sampling_params=params)["output_ids"] for p in prompts]
    small = {"max_total_tokens": 512, "schedule_conservativeness": 0.1}
    with engines(tiny_model, small, small) as tight:
        begun = [tight.start(input_ids=p, sampling_params=params) for p in prompts]
        found = [second.result(WAIT_S)["output_ids"] for _, second in begun]
        assert found == right
        wait_until(lambda: is_whole(tight.prefill), WAIT_S, "all pages of prefill back")
        wait_until(lambda: is_whole(tight.decode), WAIT_S, "all pages of decode back")


def test_layers_with_a_window_are_handed_over(tmp_path: Path) -> None:
    model = tmp_path / "windowed"
    tiny("gemma2", model)
    prompt = [2 + 7 * i % 60 for i in range(90)]
    asked = {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True}
    plain = {"skip_tokenizer_init": True}
    with Engine(str(model), **FLAGS, **plain) as alone:
        first = alone.generate(**asked)
    with engines(model, plain, plain) as both:
        found = both.ask(**asked)
        assert found["output_ids"] == first["output_ids"]
        # Plain torch rounds by how a prompt is cut into rows, and the last row begins elsewhere.
        for (mine, *_), (right, *_) in zip(
            output_of(found)["output_token_logprobs"],
            output_of(first)["output_token_logprobs"],
            strict=True,
        ):
            assert abs(mine - right) < 1e-3
        stats = both.decode.get_server_info()["internal_states"][0]["stats"]
        assert stats["computed_tokens"] < 40, "the prompt came, and was not computed"
        wait_until(lambda: is_whole(both.prefill) and is_whole(both.decode), WAIT_S, "all back")


def test_the_decode_side_computes_no_prompt(pair: Pair) -> None:
    def computed(engine: Engine) -> int:
        (state,) = engine.get_server_info()["internal_states"]
        return state["stats"]["computed_tokens"]

    wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
    before = computed(pair.decode)
    prompt = [(x * 3) % 390 + 5 for x in PROMPT]
    pair.ask(input_ids=prompt, sampling_params=GREEDY)
    wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
    assert computed(pair.decode) - before <= 300 % 16 + 8 + 1


# -- what is refused -------------------------------------------------------------------------


def test_requests_that_do_not_go_with_the_role_are_refused(pair: Pair, single: Engine) -> None:
    body = {"input_ids": PROMPT[:9], "sampling_params": GREEDY}
    for side in (pair.prefill, pair.decode):
        with pytest.raises(BanyanError, match="names no bootstrap_room"):
            side.generate(**body)
    with pytest.raises(BanyanError, match="--disaggregation-mode"):
        single.generate(**body, **pair.meeting())
    with pytest.raises(BanyanError, match="disagg_prefill_dp_rank asks for a server that shares"):
        single.generate(**body, disagg_prefill_dp_rank=0)
    with pytest.raises(BanyanError, match="bootstrap_host must name the server"):
        pair.decode.generate(**body, bootstrap_room=fresh_room())
    with pytest.raises(BanyanError, match="on another machine, and this server has no secret"):
        pair.decode.generate(**body, **{**pair.meeting(), "bootstrap_host": "192.0.2.7"})


def test_another_prompt_in_the_same_room_is_refused(pair: Pair, single: Engine) -> None:
    room = fresh_room()
    mine, other = ([(x + i) % 390 + 5 for x in PROMPT] for i in (11, 12))
    begun = pair.pool.submit(
        pair.prefill.generate, input_ids=mine, sampling_params=GREEDY, **pair.meeting(room)
    )
    with pytest.raises(BanyanError, match="another prompt there"):
        pair.decode.generate(input_ids=other, sampling_params=GREEDY, **pair.meeting(room))
    right = single.generate(input_ids=other, sampling_params=GREEDY)["output_ids"]
    assert pair.ask(input_ids=other, sampling_params=GREEDY)["output_ids"] == right
    again = pair.decode.generate(input_ids=mine, sampling_params=GREEDY, **pair.meeting(room))
    begun.result(WAIT_S)
    assert (
        again["output_ids"] == single.generate(input_ids=mine, sampling_params=GREEDY)["output_ids"]
    )


def test_a_room_is_used_once(pair: Pair) -> None:
    room, body = fresh_room(), {"input_ids": PROMPT[:50], "sampling_params": GREEDY}
    first = pair.pool.submit(pair.prefill.generate, **body, **pair.meeting(room))
    wait_until(lambda: open_rooms(pair.prefill) == 1, WAIT_S, "the room to be open")
    with pytest.raises(BanyanError, match="bootstrap_room is in use"):
        pair.prefill.generate(**body, **pair.meeting(room))
    pair.decode.generate(**body, **pair.meeting(room))
    first.result(WAIT_S)
    with pytest.raises(BanyanError, match="given away already"):
        pair.decode.generate(**body, **pair.meeting(room))
    wait_until(lambda: not open_rooms(pair.prefill), WAIT_S, "the room to be closed")
    first = pair.pool.submit(pair.prefill.generate, **body, **pair.meeting(room))
    wait_until(lambda: open_rooms(pair.prefill) == 1, WAIT_S, "the room to be open anew")
    assert pair.decode.generate(**body, **pair.meeting(room))["output_ids"]
    first.result(WAIT_S)


def test_a_prompt_that_nobody_will_take_goes_with_whoever_asked_for_it(pair: Pair) -> None:
    room, body = fresh_room(), {"input_ids": PROMPT[:50], "sampling_params": GREEDY}
    stream = pair.prefill.generate(**body, **pair.meeting(room), stream=True)
    assert len(next(stream)["output_ids"]) == 1, "it has been computed"
    wait_until(lambda: open_rooms(pair.prefill) == 1, WAIT_S, "the room to be open")
    stream.close()
    wait_until(lambda: not open_rooms(pair.prefill), WAIT_S, "the pages to go")
    with pytest.raises(BanyanError, match="has ended there"):
        pair.decode.generate(**body, **pair.meeting(room))
    wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            {"dp_size": 2, "disaggregation_bootstrap_port": 65535},
            "the last one would be 65536",
        ),
        (
            {
                "disaggregation_mode": "decode",
                "enable_hierarchical_cache": True,
                "hicache_storage_backend": "file",
            },
            "stores pages only with --disaggregation-decode-enable-offload-kvcache",
        ),
        ({"host": "0.0.0.0"}, "BANYAN_DIST_SECRET"),
        ({"disaggregation_transfer_backend": "mori"}, "use tcp"),
    ],
)
def test_what_does_not_go_with_a_handoff_is_refused_at_the_start(
    tiny_model: Path, flags: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        Engine(str(tiny_model), **{**FLAGS, "disaggregation_mode": "prefill", **flags})


# -- failures --------------------------------------------------------------------------------


def test_a_room_that_never_comes_fails_in_time(
    tiny_model: Path, single: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "0.5")
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    with engines(tiny_model) as hasty:
        with pytest.raises(BanyanError, match=r"within 0\.5 s"):
            late = hasty.pool.submit(hasty.decode.generate, **body, **hasty.meeting())
            late.result(WAIT_S / 4)
        assert hasty.ask(**body)["output_ids"] == single.generate(**body)["output_ids"]


def test_a_room_that_nobody_takes_is_given_back(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "0.5")
    room, body = fresh_room(), {"input_ids": PROMPT, "sampling_params": GREEDY}
    with engines(tiny_model) as hasty:
        given = hasty.pool.submit(hasty.prefill.generate, **body, **hasty.meeting(room))
        given.result(WAIT_S / 4)  # ends with the lease
        with pytest.raises(BanyanError, match="nobody took it in time"):
            hasty.decode.generate(**body, **hasty.meeting(room))
        assert hasty.ask(**body), "the prefill server goes on"
        wait_until(lambda: is_whole(hasty.prefill), WAIT_S, "all pages back")


@pytest.fixture
def spoiled(tiny_model: Path) -> Iterator[tuple[Pair, Proxy]]:
    proxies: list[Proxy] = []

    def through(port: int) -> int:
        proxies.append(Proxy(port))
        return proxies[0].port

    with engines(tiny_model, through=through) as found:
        yield found, proxies[0]
    proxies[0].close()


def test_a_page_that_was_changed_on_its_way_is_computed(
    spoiled: tuple[Pair, Proxy], single: Engine
) -> None:
    found, proxy = spoiled
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}

    def flip(at: int, data: bytes) -> bytes:
        place = 30_000 - at
        if 0 <= place < len(data):
            return data[:place] + bytes((data[place] ^ 1,)) + data[place + 1 :]
        return data

    proxy.spoil = flip
    answer = found.ask(**body)
    assert proxy.sent > 40_000, "the bit lies within the pages"
    assert answer["output_ids"] == single.generate(**body)["output_ids"]
    stats = found.decode.get_server_info()["internal_states"][0]["stats"]
    assert stats["computed_tokens"] > 100, "what came after the page was computed"
    wait_until(lambda: is_whole(found.decode), WAIT_S, "all pages back")


def test_a_connection_that_ends_in_the_middle_fails_its_request_alone(
    spoiled: tuple[Pair, Proxy], single: Engine
) -> None:
    found, proxy = spoiled
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}

    def cut(at: int, data: bytes) -> bytes:
        if at + len(data) > 20_000:
            raise OSError("cut")
        return data

    proxy.spoil = cut
    first, second = found.start(**body)
    with pytest.raises(BanyanError, match="was lost before the prompt was handed over"):
        second.result(WAIT_S)
    first.result(WAIT_S)
    proxy.spoil = lambda at, data: data
    assert found.ask(**body)["output_ids"] == single.generate(**body)["output_ids"]
    wait_until(lambda: is_whole(found.prefill) and is_whole(found.decode), WAIT_S, "all back")


def test_a_fake_transfer_needs_no_other_server(tiny_model: Path) -> None:
    fake = {"disaggregation_transfer_backend": "fake"}
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    with engines(tiny_model, fake, fake) as alone:
        assert len(alone.decode.generate(**body)["output_ids"]) == 8
        assert len(alone.prefill.generate(**body)["output_ids"]) == 1
        stats = alone.decode.get_server_info()["internal_states"][0]["stats"]
        assert stats["computed_tokens"] < 40, "no prompt was computed"


def test_a_decode_server_invents_the_prompts_of_requests_without_a_host(
    tiny_model: Path, single: Engine
) -> None:
    auto = {"disaggregation_decode_enable_fake_auto": True}
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    with engines(tiny_model, decode=auto) as pair:
        for more in ({}, {"bootstrap_room": 7}):
            assert len(pair.decode.generate(**body, **more)["output_ids"]) == 8
        stats = pair.decode.get_server_info()["internal_states"][0]["stats"]
        assert stats["computed_tokens"] < 80, "no prompt was computed"
        other = {**body, "input_ids": PROMPT[::-1]}
        assert pair.ask(**other)["output_ids"] == single.generate(**other)["output_ids"]
        assert is_whole(pair.decode)


def test_a_second_turn_finds_what_the_decode_server_has_stored(
    tiny_model: Path, tmp_path: Path, single: Engine
) -> None:
    options = {"path": str(tmp_path / "pages"), "prefetch_threshold": 16}
    store = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": options,
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    prefill = {"enable_hierarchical_cache": True, **store}
    decode = {"disaggregation_decode_enable_offload_kvcache": True, **store}
    long = {**GREEDY, "max_new_tokens": 160, "ignore_eos": True}
    with engines(tiny_model, prefill, decode) as pair:
        first = pair.ask(input_ids=PROMPT[:64], sampling_params=long)["output_ids"]
        written = (64 + len(first) - 1) // 16  # nothing reads the last token
        kept = tmp_path / "pages"
        wait_until(lambda: len(list(kept.rglob("*.page"))) >= written, WAIT_S, "pages to be stored")
        pair.prefill.flush_cache()
        second = {
            "input_ids": [*PROMPT[:64], *first, *PROMPT[64:80]],
            "sampling_params": GREEDY,
        }
        found = pair.ask(**second)
        assert found["output_ids"] == single.generate(**second)["output_ids"]
        hit = found["meta_info"]["cached_tokens"] // 16
        assert hit >= 0.95 * written, f"{hit} of {written} pages"
        stats = pair.prefill.get_server_info()["internal_states"][0]["stats"]
        assert stats["stored_tokens"] >= 0.95 * 16 * written
    with pytest.raises(ConfigError, match="needs --hicache-storage-backend"):
        Engine(
            str(tiny_model),
            disaggregation_mode="decode",
            disaggregation_decode_enable_offload_kvcache=True,
        )


# -- real servers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_of_servers(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANYAN_DIST_SECRET", "a long random text")
        with servers(tmp_path_factory.mktemp("pair"), tiny_model) as found:
            yield found


def test_a_pair_with_a_secret_works_while_strangers_connect(pair_of_servers: Servers) -> None:
    both = pair_of_servers
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    everybody = [p for each in (both.prefill, both.decode) for p in (each.pid, *each.members())]
    assert both.port in ports_of(everybody)
    right = both.start("/generate", body)[1].result(WAIT_S).json()["output_ids"]
    with scanned(everybody):
        for _ in range(4):
            answer = both.start("/generate", body)[1].result(WAIT_S)
            assert answer.json()["output_ids"] == right


def test_routes_and_facts_tell_of_the_role(pair_of_servers: Servers) -> None:
    both = pair_of_servers
    for server, mode in ((both.prefill, "prefill"), (both.decode, "decode")):
        assert server.http.get("/model_info").json()["disaggregation_mode"] == mode
        assert server.http.get("/health_generate").status_code == 200
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}
    first, second = both.start("/v1/chat/completions", body)
    assert first.result(WAIT_S).status_code == second.result(WAIT_S).status_code == 200
    chat = second.result().json()
    assert chat["usage"]["completion_tokens"] == 6
    first, second = both.start("/v1/chat/completions", {**body, "stream": True})
    assert first.result(WAIT_S).status_code == 200
    lines = [x[6:] for x in second.result(WAIT_S).text.splitlines() if x.startswith("data: {")]
    deltas = [json.loads(line)["choices"] for line in lines]
    text = "".join(d[0]["delta"].get("content") or "" for d in deltas if d)
    assert text == chat["choices"][0]["message"]["content"]
    prompts = {"prompt": ["One two", "three four five"], "max_tokens": 4, "temperature": 0}
    first, second = both.start("/v1/completions", prompts, [fresh_room(), fresh_room()])
    assert first.result(WAIT_S).status_code == 200
    assert len(second.result(WAIT_S).json()["choices"]) == 2


def test_a_stopped_prefill_server_is_noticed(pair_of_servers: Servers) -> None:
    both = pair_of_servers
    body = {"input_ids": PROMPT, "sampling_params": GREEDY}
    engine = both.prefill.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        answer = both.start("/generate", body)[1].result(WAIT_S)
        assert answer.status_code == 504, answer.text
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(
        lambda: both.start("/generate", body)[1].result(WAIT_S).status_code == 200,
        WAIT_S,
        "the pair to work again",
    )


def test_a_killed_prefill_server_fails_what_waits_for_it_and_nothing_else(
    tiny_model: Path, tmp_path: Path
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 1500}}
    with servers(tmp_path, tiny_model) as both:
        runs = both.start("/generate", body)[1]
        wait_until(
            lambda: runs.done() or both.decode.stats()["running"] == 1, WAIT_S, "the hand-over"
        )
        waits = both.start("/generate", body, fresh_room())  # opened; then it is killed
        lonely = both.pool.submit(
            both.decode.http.post,
            "/generate",
            json={
                **body,
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": both.port,
                "bootstrap_room": fresh_room(),
            },
        )
        wait_until(lambda: both.decode.stats()["waiting"] >= 1, WAIT_S, "one to wait")
        both.prefill.kill()
        answer = lonely.result(WAIT_S)
        assert answer.status_code == 503, answer.text
        assert waits[1].result(WAIT_S).status_code in (200, 503)
        assert runs.result(WAIT_S).status_code == 200
        late = both.decode.http.post(
            "/generate",
            json={
                **body,
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": both.port,
                "bootstrap_room": fresh_room(),
            },
        )
        assert late.status_code == 503 and "does not answer as a prefill server" in late.text
        assert both.decode.http.get("/health_generate").status_code == 200
        wait_until(lambda: not both.decode.stats()["held_pages"], WAIT_S, "all pages back")


def test_a_client_that_goes_leaves_nothing_on_either_side(pair: Pair) -> None:
    """Decode asks for a room that prefill does not have yet, and its client goes."""
    body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 900}}
    room = fresh_room()
    stream = pair.decode.generate(**body, stream=True, **pair.meeting(room))
    first = pair.pool.submit(pair.prefill.generate, **body, **pair.meeting(room))
    next(stream)
    stream.close()
    first.result(WAIT_S)
    wait_until(lambda: is_whole(pair.decode) and is_whole(pair.prefill), WAIT_S, "all pages back")
