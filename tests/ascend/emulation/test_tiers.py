"""Pages of an emulated NPU in memory of the host, and a store behind it: what was evicted from the
device comes back with the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from banyan.base.errors import BanyanError
from banyan.engine import kv_transfer_setup as movers
from banyan.kv_transfer.store import HostTier
from banyan.llm import Engine
from banyan.runner.kvstore import KVStore
from tests.ascend.emulation.device import EmulatedNpu
from tests.models.families import tiny
from tests.support.emulated_ranks import IN_ALL
from tests.system.checkpoint import LAYERS, write_tiny_model
from tests.system.serving import wait_until

PAGE, PAGES, WAIT_S = 128, 8, 60.0
PROMPT = [i * 7 % 200 + 5 for i in range(513)]
KEPT = 512
"""Tokens of PROMPT in whole pages, the last token left out."""
OTHERS = [[i * (11 + n) % 200 + 5 for i in range(600)] for n in range(3)]
FLAGS = {
    **{"device": "npu", "dtype": "bfloat16", "page_size": PAGE, "threads": 1},
    **{"engine_mode": "inprocess", "max_total_tokens": PAGES * PAGE},
    **{"enable_hierarchical_cache": True, "hicache_storage_prefetch_policy": "wait_complete"},
    **{"cuda_graph_bs": [1]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiers") / "model")


@pytest.fixture
def tiers(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> list[HostTier]:
    """Those that engines open."""
    opened = list[HostTier]()

    class Seen(HostTier):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            opened.append(self)

    monkeypatch.setattr(movers, "HostTier", Seen)
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    monkeypatch.setenv("BANYAN_NPU_CHECKS", "1")
    return opened


@contextmanager
def start(model: Path, **flags: object) -> Iterator[Engine]:
    with Engine(str(model), **{**FLAGS, **flags}) as engine:
        yield engine


def ask(engine: Engine, prompt: list[int], **fields: object) -> dict:
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    asked = {"return_logprob": True, **fields}
    return engine.generate(input_ids=prompt, sampling_params=params, **asked)


def output_of(found: dict) -> tuple:
    return found["output_ids"], found["meta_info"]["output_token_logprobs"]


def details(found: dict) -> dict:
    return found["meta_info"]["cached_tokens_details"]


def kept(tier: HostTier) -> dict[bytes, bytes]:
    return {name: page.tobytes() for name, page in tier._pages.items()}


@pytest.mark.parametrize("copies", ["kernel_ascend", pytest.param("direct", marks=IN_ALL)])
def test_pages_come_back_bit_for_bit(model: Path, tiers: list[HostTier], copies: str) -> None:
    with start(model, hicache_io_backend=copies) as engine:
        ask(engine, PROMPT)
        wait_until(lambda: len(kept(tiers[0])) >= KEPT // PAGE, WAIT_S, "the pages to be kept")
        here = ask(engine, PROMPT)
        for other in OTHERS:
            ask(engine, other)
        back = ask(engine, PROMPT)
    assert details(here) == {"device": KEPT, "host": 0, "storage": 0, "storage_backend": "host"}
    assert details(back) == {"device": 0, "host": KEPT, "storage": 0, "storage_backend": "host"}
    assert output_of(back) == output_of(here)


def test_the_ratio_and_the_size_say_how_much_is_kept(model: Path, tiers: list[HostTier]) -> None:
    """With room for two pages, those of a prompt before are gone."""
    with start(model, hicache_ratio=2.5 / (PAGES + 1)) as engine:
        ask(engine, PROMPT)
        for other in OTHERS:
            ask(engine, other)
        assert len(kept(tiers[0])) <= 2
        assert details(ask(engine, PROMPT))["host"] == 0
    with start(model, hicache_ratio=0.1, hicache_size=1):
        pass
    assert tiers[1].capacity_bytes == 10**9


def test_the_layout_says_how_the_parts_of_a_page_lie(model: Path, tiers: list[HostTier]) -> None:
    """Layer by layer keys and values, or the keys of all layers first."""
    pages = list[dict[bytes, bytes]]()
    for layout in ("page_first_direct", "page_first_kv_split"):
        with start(model, hicache_mem_layout=layout) as engine:
            ask(engine, PROMPT)
            wait_until(lambda: len(kept(tiers[-1])) >= KEPT // PAGE, WAIT_S, "pages")
            pages.append(kept(tiers[-1]))
    direct, found = pages
    assert direct.keys() == found.keys()
    for name, page in direct.items():
        parts = np.frombuffer(page, np.uint8).reshape(LAYERS, 2, -1)
        assert found[name] == parts.swapaxes(0, 1).tobytes() != page


def test_pages_are_copied_in_the_way_that_is_asked_for(
    model: Path, tiers: list[HostTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways, arrange = list[bool](), KVStore.arrange

    def seen(self: KVStore, is_by_name: bool, is_apart: bool) -> None:
        ways.append(is_apart)
        arrange(self, is_by_name, is_apart)

    monkeypatch.setattr(KVStore, "arrange", seen)
    for copies in ("kernel_ascend", "direct"):
        with start(model, hicache_io_backend=copies):
            pass
    assert ways == [False, True]


@IN_ALL
def test_a_store_behind_the_host_outlives_the_process(
    model: Path, tiers: list[HostTier], tmp_path: Path
) -> None:
    flags = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": {"path": str(tmp_path / "pages")},
    }
    for life in range(2):
        with start(model, **flags) as engine:
            found = ask(engine, PROMPT)
            wait_until(lambda: len(kept(tiers[-1])) >= KEPT // PAGE, WAIT_S, "pages")
            here = ask(engine, PROMPT)
        assert details(found)["storage"] == KEPT * life
    assert output_of(found) == output_of(here)


LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
RANKS = {
    "tp 2": ("", {"tp_size": 2}),
    "tp 2, each tensor by itself": ("", {"tp_size": 2, "hicache_io_backend": "direct"}),
    "tp 2, keys of all layers first": (
        *("", {"tp_size": 2, "hicache_mem_layout": "page_first_kv_split"}),
    ),
    "pp 2": ("", {"pp_size": 2}),
    "tp 4 of a model with two KV heads": ("", {"tp_size": 4}),
    "tp 2 of latents": ("deepseek v2", {"tp_size": 2}),
    "dp attention": ("", {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}),
    "ep 2 of latents with an indexer": ("deepseek v3.2", {"tp_size": 2, "ep_size": 2}),
}
IN_TEST = ("tp 2", "dp attention")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in IN_TEST else IN_ALL) for name in RANKS]
)
def test_pages_of_several_ranks_come_back_bit_for_bit(
    model: Path, npu: EmulatedNpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Each in a process of its own: the first one carries the pages of all of them."""
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    monkeypatch.setenv("BANYAN_NPU_CHECKS", "1")
    variant, flags = RANKS[layout]
    if variant:
        index = {"index_head_dim": 128} if variant == "deepseek v3.2" else {}
        tiny(variant, tmp_path, max_position_embeddings=1024, **LATENTS, **index)
        model, flags = tmp_path, flags | {"skip_tokenizer_init": True}
    prompts = [[id % 90 + 5 for id in each] for each in (PROMPT, *OTHERS)]
    replica = {"data_parallel_rank": 0} if "dp_size" in flags else {}
    with start(model, engine_mode="normal", **flags) as engine:
        ask(engine, prompts[0], **replica)
        here = ask(engine, prompts[0], **replica)
        for other in prompts[1:]:
            ask(engine, other, **replica)
        back = ask(engine, prompts[0], **replica)
    assert details(here)["device"] == KEPT
    assert details(back) == {"device": 0, "host": KEPT, "storage": 0, "storage_backend": "host"}
    assert output_of(back) == output_of(here)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            {"hicache_io_backend": "kernel"},
            "--hicache-io-backend kernel is not available .* pages of GPUs",
        ),
        ({"hicache_mem_layout": "page_head"}, "--hicache-mem-layout page_head is not available"),
        ({"tp_size": 2, "attn_cp_size": 2}, "not available with --attn-cp-size 2"),
        ({"disaggregation_mode": "decode"}, "not available on npu with --disaggregation-mode: "),
        ({"hicache_ratio": 0.0}, "--hicache-ratio 0 without --hicache-size"),
        ({"hicache_size": 10**6}, r"would take 1,000,000.0 GB, and .* GB are free"),
        ({"hicache_storage_backend": "host"}, "is no store that outlives"),
    ],
)
def test_what_is_no_tier_of_an_npu_is_refused(model: Path, tiers, flags: dict, why: str) -> None:
    with pytest.raises(BanyanError, match=why), start(model, **flags):
        pass
