"""Adapters of experts and routers beside what drafts, and handed over between two servers."""

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from banyan.llm import Engine
from tests.models.drafting import tiny_mtp
from tests.models.families import tiny
from tests.system.handing import engines
from tests.system.test_lora_beside import EXPERTS, random_adapter

OUTER = pytest.mark.skipif(not os.environ.get("PARALLEL"), reason="make test-parallel")
REPEATING = [(x % 9) * 7 + 20 for x in range(72)]
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 20, "ignore_eos": True}
FLAGS = {
    "engine_mode": "inprocess",
    "threads": 1,
    "max_total_tokens": 4096,
    "cpu_activations": "fp32",
    "skip_tokenizer_init": True,
}


def output_of(answer: dict) -> tuple[list[int], list[float]]:
    scores = answer["meta_info"]["output_token_logprobs"]
    return answer["output_ids"], [score for score, *_ in scores]


def asked(**fields: object) -> list[dict[str, object]]:
    """With the adapter and without, greedy and drawn."""
    return [
        {"input_ids": REPEATING, "sampling_params": params, "lora_path": name, **fields}
        for name in ("a", None)
        for params in (GREEDY, SEEDED)
    ]


def answers(engine: Engine) -> list[dict]:
    return [engine.generate(**body) for body in asked(return_logprob=True)]


@pytest.mark.parametrize("algorithm", ["NGRAM", "NEXTN", pytest.param("STANDALONE", marks=OUTER)])
def test_drafts_change_no_bit_next_to_adapters_of_experts(algorithm: str, tmp_path: Path) -> None:
    """A draft model has no adapters: its drafts are guesses."""
    variant = "deepseek v3" if algorithm == "NEXTN" else "qwen2 moe"
    reference = tiny(variant, tmp_path / "plain")
    base = tmp_path / "base"
    (tiny_mtp if algorithm == "NEXTN" else tiny)(variant, base)
    path = random_adapter(reference, tmp_path / "a", "o_proj", *EXPERTS, "gate.weight")
    flags = {**FLAGS, "lora_paths": [f"a={path}"]}
    drafts: dict[str, object] = {"speculative_algorithm": algorithm}
    if algorithm == "STANDALONE":
        drafts["speculative_draft_model_path"] = str(tmp_path / "plain")
    with Engine(str(base), **flags) as plain:
        right = [output_of(answer) for answer in answers(plain)]
    assert right[0] != right[2]
    with Engine(str(base), **flags, **drafts, disable_adaptive_drafts=True) as drafting:
        found = answers(drafting)
        assert [output_of(answer) for answer in found] == right
        assert drafting.stats().verify_rows > 0 and drafting.stats().leaked == 0
        company = drafting.generate(
            input_ids=[REPEATING] * 4, sampling_params=GREEDY, lora_path=["a", None] * 2
        )
        expected = [right[0][0], right[2][0]] * 2
        assert [answer["output_ids"] for answer in company] == expected


@OUTER
def test_adapters_of_experts_are_handed_over_with_their_prompts(tmp_path: Path) -> None:
    reference = tiny("qwen2 moe", tmp_path / "base")
    path = random_adapter(reference, tmp_path / "a", "o_proj", *EXPERTS, "gate.weight")
    flags = {**FLAGS, "lora_paths": [f"a={path}"]}
    with Engine(str(tmp_path / "base"), **flags) as single:
        right = [output_of(answer) for answer in answers(single)]
    assert right[0] != right[2]
    own = {key: flags[key] for key in ("cpu_activations", "skip_tokenizer_init", "lora_paths")}
    with engines(tmp_path / "base", {**own, "chunked_prefill_size": 16}, own) as pair:
        assert [output_of(pair.ask(**body)) for body in asked(return_logprob=True)] == right


@OUTER
def test_rows_sent_to_their_experts_go_with_adapters_other_weights_and_pairs(
    tmp_path: Path,
) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    reference = tiny("qwen2 moe, some dense", base)
    shutil.copytree(base, other)
    weights = load_file(other / "model.safetensors")
    changed = {name: w * 3 if "experts" in name else w for name, w in weights.items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    path = random_adapter(reference, tmp_path / "a", "o_proj", *EXPERTS, "gate.weight")
    own = {key: FLAGS[key] for key in ("cpu_activations", "skip_tokenizer_init")}
    flags = {**own, "lora_paths": [f"a={path}"], "tp_size": 2}
    bodies, found = asked(return_logprob=True), {}
    for backend in ("none", "deepep"):
        there = {**flags, "ep_size": 2, "moe_a2a_backend": backend}
        with Engine(str(base), **there, max_total_tokens=4096) as engine:
            before = [output_of(engine.generate(**body)) for body in bodies]
            assert engine.update_weights_from_disk(str(other))[0]
            found[backend] = before, [output_of(engine.generate(**body)) for body in bodies]
    before, after = found["none"]
    assert found["deepep"] == found["none"] and before != after
    sends = {**flags, "moe_a2a_backend": "deepep"}
    with engines(base, {**sends, "chunked_prefill_size": 16}, sends) as pair:
        assert [output_of(pair.ask(**body)) for body in bodies] == before
