"""Drafts on the emulated NPU: rows that verify them, eager and in graphs, against the CPU."""

from pathlib import Path

import pytest
import torch

import banyan
from banyan.ascend.ops import paged_attention
from banyan.base.errors import BanyanError
from tests.ascend.emulation.device import EmulatedNpu
from tests.models.drafting import tiny_eagle, tiny_eagle3, tiny_mtp
from tests.models.families import tiny
from tests.support.emulated import CAPTURED, IS_WHOLE, LATENT, ROOM, compare, start

WAYS = {"captured": {"cuda_graph_bs": [1, 2, 4]}, "eager": {"disable_cuda_graph": True}}
LENGTHS = (150, 21, 9)
TOKENS = (30, 20, 12)


def made(drafter: str, folder: Path) -> dict[str, object]:
    """A tiny model, and the flags of what drafts for it."""
    named: dict[str, object] = {"disable_adaptive_drafts": True, "speculative_num_draft_tokens": 4}
    if drafter == "NEXTN":
        tiny_mtp("deepseek v3", folder, **ROOM, **LATENT)
    elif drafter == "NEXTN of an indexer":  # which chooses 11 positions
        tiny_mtp("deepseek v3.2", folder, **ROOM, **CAPTURED["deepseek v3.2"])
        drafter = "NEXTN"
    elif drafter == "EAGLE":
        tiny_eagle("mistral", folder, folder / "eagle", **ROOM, hidden_size=96)
    elif drafter == "EAGLE3":
        tiny_eagle3(
            "qwen3", folder, folder / "eagle", **ROOM, hidden_size=96, head_dim=16, known=60
        )
    else:
        tiny("qwen3", folder, num_hidden_layers=3, **ROOM, head_dim=int(drafter[5:]))
        drafter = "NGRAM"
    if drafter.startswith("EAGLE"):
        named["speculative_draft_model_path"] = str(folder / "eagle")
    return named | {"speculative_algorithm": drafter}


def answers(engine: banyan.Engine, drawn: bool = False) -> list[dict]:
    """Prompts that repeat themselves."""
    ids = [[5 + 3 * (i % 7) + n % 5 for i in range(n)] for n in LENGTHS]
    how = {"temperature": 0.8, "sampling_seed": 3} if drawn else {"temperature": 0}
    params = [how | {"max_new_tokens": n, "ignore_eos": True} for n in TOKENS]
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    return engine.generate(input_ids=ids, sampling_params=params, **asked)


def plain(engine: banyan.Engine, tokens: int, count: int = 2) -> dict:
    """Greedy and unscored, so that graphs sample; the same prompt for all."""
    params = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
    ids = [[5 + 3 * (i % 7) for i in range(21)]] * count
    return engine.generate(input_ids=ids, sampling_params=params)


WHOLE = pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
CASES = [
    ("EAGLE", "captured"),
    *(
        pytest.param(drafter, way, marks=WHOLE)
        for drafter, way in [
            *(("NGRAM128", "captured"), ("NGRAM128", "eager")),
            *(("NGRAM64", "captured"), ("NGRAM64", "eager")),
            *(("NEXTN", "captured"), ("NEXTN", "eager")),
            *(("NEXTN of an indexer", "captured"), ("NEXTN of an indexer", "eager")),
            *(("EAGLE", "eager"), ("EAGLE3", "captured")),
        ]
    ),
]


@pytest.mark.parametrize(("drafter", "way"), CASES)
def test_with_drafts_it_says_what_it_says_on_the_cpu(npu, tmp_path, drafter: str, way: str) -> None:
    """Nothing comes to the host but late: what rows sampled and what is drafted behind it."""
    named = made(drafter, tmp_path)
    with start(tmp_path, "cpu", dtype="float32", cpu_activations="fp32") as engine:
        wanted = answers(engine)
    with start(tmp_path, "npu", dtype="float16", **WAYS[way]) as engine:
        alone = [each["output_ids"] for each in answers(engine)]
    with start(tmp_path, "npu", dtype="float16", **WAYS[way], **named) as engine:
        found = answers(engine)
        assert [each["output_ids"] for each in found] == alone
        assert compare(found, wanted) > len(TOKENS)
        before = npu.counters()
        drafted = plain(engine, 40)
        after = npu.counters()
    proposed = sum(each["meta_info"]["spec_num_proposed_drafts"] for each in drafted)
    assert proposed > 0
    assert after["to_host"] - before["to_host"] == after["to_host_late"] - before["to_host_late"]


TREES = {"speculative_eagle_topk": 4, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8}
TREE_CASES = [
    ("NEXTN", "captured"),
    *(
        pytest.param(*case, marks=WHOLE)
        for case in [
            *(("EAGLE", "captured"), ("EAGLE", "eager"), ("EAGLE3", "captured")),
            ("NEXTN of an indexer", "eager"),
        ]
    ),
]


@pytest.mark.parametrize(("drafter", "way"), TREE_CASES)
def test_trees_of_drafts_change_no_answer(
    npu: EmulatedNpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, way: str
) -> None:
    named, trees = made(drafter, tmp_path) | TREES, list[int]()
    seen = paged_attention.seen_along

    def counted(paths: list[list[int]], *given: int) -> torch.Tensor:
        trees.append(len(paths))
        return seen(paths, *given)

    monkeypatch.setattr(paged_attention, "seen_along", counted)
    with start(tmp_path, "npu", dtype="float16", **WAYS[way]) as engine:
        alone = [each["output_ids"] for each in answers(engine)]
    with start(tmp_path, "cpu", dtype="float32", cpu_activations="fp32") as engine:
        wanted = answers(engine)
    with start(tmp_path, "npu", dtype="float16", **WAYS[way], **named) as engine:
        found = answers(engine)
    assert max(trees, default=0) > 1
    assert compare(found, wanted) > len(TOKENS)
    assert [each["output_ids"] for each in found] == alone


@WHOLE
def test_rows_that_draw_are_sampled_behind_the_graph_as_without_drafts(npu, tmp_path) -> None:
    named = made("NGRAM128", tmp_path)
    found = []
    for flags in ({}, named):
        with start(tmp_path, "npu", dtype="float16", **WAYS["captured"], **flags) as engine:
            found.append([each["output_ids"] for each in answers(engine, drawn=True)])
    assert found[0] == found[1]


def test_a_row_of_more_tokens_than_the_device_verifies_is_refused(npu: EmulatedNpu, tmp_path):
    named = made("NGRAM128", tmp_path) | {"speculative_num_draft_tokens": 17}
    with (
        pytest.raises(BanyanError, match="at most 16 tokens"),
        start(tmp_path, "npu", dtype="float16", **named),
    ):
        pass
