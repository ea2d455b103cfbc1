"""Two servers on emulated NPUs share the work: pages leave one device and come to another."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.models.drafting import tiny_mtp
from tests.support.emulated import LATENT
from tests.support.emulated_ranks import IN_ALL
from tests.support.handoff import is_whole
from tests.support.nodes import over_nodes
from tests.support.transfer_engines import PACKAGES, needs
from tests.system.checkpoint import write_tiny_model
from tests.system.handing import FLAGS, WAIT_S, Pair, Servers, engines
from tests.system.serving import free_port, settled, wait_until
from tests.system.test_handoff_kinds import correct

ON_NPU = {**FLAGS, "device": "npu", "dtype": "bfloat16", "page_size": 128, "max_total_tokens": 2048}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 8, "ignore_eos": True}
PROMPT = [2 + 7 * i % 60 for i in range(300)]
DRAFTS = 3


@pytest.fixture(autouse=True)
def emulated(npu: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    monkeypatch.setenv("BANYAN_NPU_CHECKS", "1")


@contextmanager
def both(model: Path, **flags: object) -> Iterator[tuple[Pair, Engine]]:
    """A pair whose pages are cut on their way, and one engine."""
    given = {**ON_NPU, **flags}
    with (
        Engine(str(model), **given) as single,
        engines(model, {**given, "chunked_prefill_size": 128, "page_size": 256}, given) as pair,
    ):
        yield pair, single


def computed(engine: Engine) -> int:
    (state,) = engine.get_server_info()["internal_states"]
    return state["stats"]["computed_tokens"]


def by(transfer: str, patch: pytest.MonkeyPatch) -> dict[str, object]:
    """The flags of a transfer backend, and the variables that it needs."""
    if transfer == "ascend":
        needs(transfer)
        patch.setenv("ASCEND_MF_STORE_URL", f"tcp://127.0.0.1:{free_port()}")
    return {"disaggregation_transfer_backend": transfer}


@pytest.mark.parametrize("transfer", ["tcp", "ascend"])
def test_a_pair_of_npus_answers_like_one(
    tmp_path: Path, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = by(transfer, monkeypatch)
    with both(write_tiny_model(tmp_path / "model"), **flags) as (pair, single):
        for params in (GREEDY, SEEDED):
            for prompt in (PROMPT, PROMPT[:256], PROMPT):
                body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
                found, right = pair.ask(**body), single.generate(**body)
                assert found["output_ids"] == right["output_ids"]
        wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")
        before = computed(pair.decode)
        pair.ask(input_ids=[9, *PROMPT], sampling_params=GREEDY)
        wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
        assert computed(pair.decode) - before < 301 - 256 + 16, "the prompt came as pages"


def test_a_second_turn_finds_what_a_decode_server_on_an_npu_has_stored(tmp_path: Path) -> None:
    """Pages leave a device for the store, and come from there to the other one's."""
    model, kept = write_tiny_model(tmp_path / "model"), tmp_path / "pages"
    store = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": {"path": str(kept), "prefetch_threshold": 128},
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    prefill = {**ON_NPU, **store, "enable_hierarchical_cache": True}
    decode = {**ON_NPU, **store, "disaggregation_decode_enable_offload_kvcache": True}
    with Engine(str(model), **ON_NPU) as single, engines(model, prefill, decode) as pair:
        long = GREEDY | {"max_new_tokens": 260}
        first = pair.ask(input_ids=PROMPT[:200], sampling_params=long)["output_ids"]
        written = (200 + 260 - 1) // 128
        wait_until(lambda: len(list(kept.rglob("*.page"))) >= written, WAIT_S, "pages to be stored")
        pair.prefill.flush_cache()
        second = {"input_ids": [*PROMPT[:200], *first, *PROMPT[:9]], "sampling_params": GREEDY}
        found = pair.ask(**second)
        assert found["output_ids"] == single.generate(**second)["output_ids"]
        assert found["meta_info"]["cached_tokens"] == 128 * written


@IN_ALL
@pytest.mark.parametrize("transfer", ["tcp", "ascend"])
def test_two_prefill_servers_feed_one(
    tmp_path: Path, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a process of its own: a request's pages come from whichever of the two has computed
    them, while the other hands over too."""
    model, flags = write_tiny_model(tmp_path / "model"), by(transfer, monkeypatch)
    prompts = [[(x * n) % 61 + 2 for x in PROMPT] for n in range(1, 5)]
    bodies = [{"input_ids": ids, "sampling_params": GREEDY} for ids in prompts]
    given = {**ON_NPU, **flags, "engine_mode": "normal"}
    first = {**given, "chunked_prefill_size": 128}
    second = {**FLAGS, **first, "disaggregation_mode": "prefill"}
    second["disaggregation_bootstrap_port"] = port = free_port()
    with Engine(str(model), **ON_NPU) as single:
        right = [single.generate(**body)["output_ids"] for body in bodies]
    with engines(model, first, given) as pair, Engine(str(model), **second) as other:
        beside = Pair(other, pair.decode, port)
        asked = [(pair, beside)[at % 2].start(**body) for at, body in enumerate(bodies)]
        assert [decode.result(WAIT_S)["output_ids"] for _, decode in asked] == right
        for prefill, _ in asked:
            prefill.result(WAIT_S)
        servers = (pair.prefill, other, pair.decode)
        wait_until(lambda: all(is_whole(each) for each in servers), WAIT_S, "all back")
        assert all(computed(each) >= 2 * 256 for each in (pair.prefill, other))
        assert computed(pair.decode) <= len(bodies) * (300 - 256 + 8), "pages came"
        beside.pool.shutdown(wait=False, cancel_futures=True)


@IN_ALL
def test_what_a_layer_that_drafts_keeps_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the keys of its indexer, which chooses 11 positions: as many drafts come true as of one
    server, but for those of the row that runs what is left of the prompt."""
    sizes = LATENT | {"index_head_dim": 128, "max_position_embeddings": 1024}
    tiny_mtp("deepseek v3.2", tmp_path, **sizes)
    named = {"speculative_algorithm": "NEXTN", "disable_adaptive_drafts": True}
    flags = {**ON_NPU, **named, "speculative_num_draft_tokens": DRAFTS + 1}
    flags |= {"skip_tokenizer_init": True, "disable_overlap_schedule": True, "dtype": "float16"}
    flags |= by("ascend", monkeypatch)
    body = {"input_ids": [5 + 3 * (i % 7) for i in range(300)], "return_logprob": True}
    params = {**GREEDY, "max_new_tokens": 40}
    with (
        Engine(str(tmp_path), **flags) as single,
        engines(tmp_path, {**flags, "chunked_prefill_size": 128}, flags) as pair,
    ):
        right = single.generate(**body, sampling_params=params)
        found = pair.ask(**body, sampling_params=params)
        assert found["output_ids"] == right["output_ids"]
        assert correct(found) >= correct(right) - DRAFTS > DRAFTS
        wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")
        assert computed(pair.decode) < 300 - 256 + 4 * 40, "the prompt came as pages"


JOINED = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "engine_mode": "normal"}
LAYOUTS = {
    "tp 2 to tp 2": ({"tp_size": 2}, {"tp_size": 2}),
    "tp 1 to tp 2": ({"disaggregation_decode_tp": 2}, {"tp_size": 2}),
    "tp 2 to tp 1": ({"tp_size": 2}, {}),
    "pp 2 to tp 2": ({"pp_size": 2}, {"tp_size": 2}),
    "cp 2 to tp 1": ({"tp_size": 2, "attn_cp_size": 2}, {}),
    "joined 2 to joined 2 x tp 2": (JOINED, {**JOINED, "tp_size": 4}),
}
"""Of prefill, and of decode."""
IN_TEST = "tp 2 to tp 2"


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == IN_TEST else IN_ALL) for name in LAYOUTS],
)
def test_ranks_of_npus_hand_over_what_one_computes(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a device of its own, in a process of its own."""
    transfer = "tcp" if find_spec(PACKAGES["ascend"]) is None else "ascend"
    flags = ON_NPU | by(transfer, monkeypatch)
    model, (prefill, decode) = write_tiny_model(tmp_path / "model"), LAYOUTS[layout]
    bodies = [
        {"input_ids": [(x * n) % 61 + 2 for x in PROMPT[:length]], "sampling_params": GREEDY}
        for n, length in ((1, 300), (2, 256), (1, 290), (3, 20))
    ]
    with Engine(str(model), **ON_NPU) as single:
        right = [single.generate(**body)["output_ids"] for body in bodies]
    first = {**flags, **prefill, "chunked_prefill_size": 128}
    with engines(model, first, {**flags, **decode}) as pair:
        assert [pair.ask(**body)["output_ids"] for body in bodies] == right
        wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")
        before = computed(pair.decode)
        pair.ask(input_ids=[9, *PROMPT], sampling_params=GREEDY)
        wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
        assert computed(pair.decode) - before < 301 - 256 + 16, "the prompt came as pages"


@IN_ALL
def test_ranks_of_npus_on_several_nodes_hand_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages leave a device of another node, and come to one."""
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model, port = write_tiny_model(tmp_path / "model"), free_port()
    prompts = [[(x * n) % 61 + 2 for x in PROMPT] for n in (1, 2, 3)]
    with Engine(str(model), **ON_NPU) as single:
        right = [
            single.generate(input_ids=p, sampling_params=GREEDY)["output_ids"] for p in prompts
        ]
    flags = ("--device", "npu", "--dtype", "bfloat16", "--skip-server-warmup")
    rooms = ("--disaggregation-bootstrap-port", str(port))
    with (
        over_nodes(
            tmp_path / "first", model, *flags, "--disaggregation-mode", "prefill", *rooms
        ) as first,
        over_nodes(tmp_path / "second", model, *flags, "--disaggregation-mode", "decode") as second,
    ):
        pair = Servers(first, second, port)
        for prompt, whole in zip(prompts, right, strict=True):
            body = {"input_ids": prompt, "sampling_params": GREEDY}
            answers = [each.result(WAIT_S) for each in pair.start("/generate", body)]
            assert answers[1].json()["output_ids"] == whole, answers[0].text
        stats = settled(second.stats, len(prompts))
        assert stats["computed_tokens"] <= len(prompts) * (300 - 256 + 8), "pages came"
