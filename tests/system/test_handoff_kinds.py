"""Pairs of servers with adapters, drafts, and caches and weights of all kinds answer like one."""

import os
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.models.families import tiny
from tests.support.draft_models import like
from tests.support.handoff import GREEDY, PROMPT, is_whole, output_of
from tests.support.hidden_drafts import TREE, with_words
from tests.support.lora import write_adapter
from tests.system.handing import FLAGS, WAIT_S, Pair, engines
from tests.system.serving import wait_until
from tests.system.test_handoff_ranks import JOINED

ALL = bool(os.environ.get("PARALLEL"))
DRAFTS = 3
"""Of a row, at most."""
SEEDED = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 12}
REPEATING = [(x % 9) * 11 + 20 for x in range(150)]
KINDS = {
    "NGRAM drafts": {"speculative_algorithm": "NGRAM"},
    "NGRAM trees": {"speculative_algorithm": "NGRAM", "speculative_ngram_min_bfs_breadth": 3},
    "int8 pages": {"kv_cache_dtype": "int8"},
    "fp8 pages": {"kv_cache_dtype": "fp8_e4m3"},
    "weights of 8 bits": {"quantization": "int8"},
}


def check(pair: Pair, single: Engine, **more: object) -> None:
    """Greedy and by seed, with scores, from nothing and from what both have cached."""
    for params in (GREEDY, SEEDED):
        for prompt in (REPEATING, PROMPT[:100], PROMPT):
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **more}
            assert output_of(pair.ask(**body)) == output_of(single.generate(**body))
    wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all pages back")


def test_adapters_are_handed_over_with_their_prompts(tiny_model: Path, tmp_path: Path) -> None:
    mine = write_adapter(tmp_path / "a", seed=1)
    other = write_adapter(tmp_path / "b", seed=2)
    flags = {"enable_lora": True, "lora_paths": [f"a={mine}", f"b={other}"]}
    # What the other server calls b are other matrices.
    swapped = {"enable_lora": True, "lora_paths": [f"a={mine}", f"b={mine}"]}
    with (
        engines(tiny_model, flags, swapped) as pair,
        Engine(str(tiny_model), **FLAGS, **flags) as single,
    ):
        for adapter in ("a", None):
            check(pair, single, lora_path=adapter)
        answers = [
            pair.ask(input_ids=PROMPT, sampling_params=GREEDY, lora_path=name)["output_ids"]
            for name in ("a", None)
        ]
        assert answers[0] != answers[1]
        _, second = pair.start(input_ids=PROMPT, sampling_params=GREEDY, lora_path="b")
        with pytest.raises(BanyanError, match="or with other weights"):
            second.result(WAIT_S)


@pytest.mark.skipif(not ALL, reason="make test-parallel")
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_caches_and_weights_are_handed_over(kind: str, tiny_model: Path) -> None:
    flags = KINDS[kind]
    with (
        engines(tiny_model, {**flags, "chunked_prefill_size": 64}, flags) as pair,
        Engine(str(tiny_model), **FLAGS, **flags) as single,
    ):
        check(pair, single)


FAMILIES = {
    "qwen3 next": {},
    "lfm2": {},
    "bamba": {},
    "falcon h1": {},
    "jamba": {"mamba_dt_rank": 8},
    "nemotron h": {"n_groups": 2},
    "mamba2": {},
    "mamba": {},
}
TP2 = {"tp_size": 2}
LAYOUTS = {"1 to 1": ({}, {}), "1 to 2": ({}, TP2), "2 to 1": (TP2, {}), "2 to 2": (TP2, TP2)}
"""Ranks of prefill, and of decode."""
FEW = [("qwen3 next", "1 to 2"), ("mamba2", "1 to 1")]
CUT = [(family, layout) for family in FAMILIES for layout in LAYOUTS]


@pytest.mark.parametrize(("family", "layout"), CUT if ALL else FEW)
def test_states_are_handed_over_with_the_pages(family: str, layout: str, tmp_path: Path) -> None:
    """Prompts that end within a unit and with one, in pieces, and prefixes that either side has."""
    sizes = {"max_position_embeddings": 2048, "eos_token_id": None}
    tiny(family, tmp_path, **sizes, **FAMILIES[family])
    plain = {"skip_tokenizer_init": True, "cpu_activations": "fp32"}
    prefill, decode = LAYOUTS[layout]
    prompts = [[2 + (7 * i * i + k) % 90 for i in range(n)] for k, n in enumerate((300, 256, 17))]
    longer = [*prompts[0][:280], *range(3, 60)]
    with (
        Engine(str(tmp_path), **FLAGS, **plain) as single,
        engines(
            tmp_path, {**plain, **prefill, "chunked_prefill_size": 128}, {**plain, **decode}
        ) as pair,
    ):
        for params in (GREEDY, SEEDED):
            for prompt in (*prompts, *prompts, longer):
                body = {"input_ids": prompt, "sampling_params": params}
                found, right = pair.ask(**body), single.generate(**body)
                assert found["output_ids"] == right["output_ids"], len(prompt)
            pair.decode.flush_cache()
        wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")
        before = computed(pair.decode)
        body = {"input_ids": [4, *prompts[0]], "sampling_params": GREEDY}
        assert pair.ask(**body)["output_ids"] == single.generate(**body)["output_ids"]
        wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
        assert computed(pair.decode) - before < 301 - 256 + 16, "the prompt came, with its state"


ALGORITHMS = ("NEXTN", "EAGLE", "EAGLE3", "STANDALONE")
VARIANTS = {"NEXTN": "deepseek v3", "EAGLE": "mistral", "EAGLE3": "qwen3"}


def computed(engine: Engine) -> int:
    (state,) = engine.get_server_info()["internal_states"]
    return state["stats"]["computed_tokens"]


@pytest.mark.parametrize("tree", [{}, TREE] if ALL else [{}])
@pytest.mark.parametrize("algorithm", ALGORITHMS if ALL else ("NEXTN",))
def test_what_a_draft_model_keeps_is_handed_over(
    algorithm: str, tree: dict[str, int], tiny_model: Path, tmp_path: Path
) -> None:
    """The answers of one server, and as many drafts that come true."""
    flags: dict[str, object] = {"speculative_algorithm": algorithm, "disable_adaptive_drafts": True}
    flags |= tree
    most = TREE["speculative_num_steps"] if tree else DRAFTS
    model = tiny_model
    if algorithm == "STANDALONE":
        flags["speculative_draft_model_path"] = str(like(tiny_model, tmp_path / "draft", 0.1))
    else:
        model = with_words(VARIANTS[algorithm], tmp_path / "model", tiny_model)
    if algorithm in ("EAGLE", "EAGLE3"):
        flags["speculative_draft_model_path"] = str(model / "eagle")
    one = {"disable_overlap_schedule": True}  # how many drafts a row brings is known then
    with (
        Engine(str(model), **FLAGS, **flags, **one) as single,
        engines(model, {**flags, "chunked_prefill_size": 64}, {**flags, **one}) as pair,
    ):
        seen = 0
        for params in ({**GREEDY, "max_new_tokens": 120}, SEEDED):
            for prompt in (REPEATING, PROMPT):
                body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
                found, right = pair.ask(**body), single.generate(**body)
                assert output_of(found) == output_of(right)
                # The row of the prompt's last tokens, which one server has not, brings no drafts.
                assert correct(found) >= correct(right) - most
                assert pair.ask(**body)["output_ids"] == right["output_ids"]
                seen += correct(right)
        assert seen > 2 * most
        wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")


@pytest.mark.parametrize("algorithm", ["NEXTN", "NGRAM"] if ALL else ["NEXTN"])
def test_joined_replicas_verify_drafts_of_what_they_take(
    algorithm: str, tiny_model: Path, tmp_path: Path
) -> None:
    """One of them has more to do than the other, and rows have fewer drafts than was agreed."""
    model = with_words("deepseek v3", tmp_path / "model", tiny_model)
    flags = {"speculative_algorithm": algorithm, "disable_adaptive_drafts": True}
    joined = {**JOINED, "enable_dp_lm_head": True, "chunked_prefill_size": 64}
    params = [{**GREEDY, "max_new_tokens": 60}, {**SEEDED, "max_new_tokens": 40}, GREEDY]
    bodies = [
        {"input_ids": prompt, "sampling_params": each, "return_logprob": True}
        for each in params
        for prompt in (REPEATING, PROMPT, PROMPT[3:90])
    ]
    with Engine(str(model), **FLAGS, **flags) as single:
        right = [single.generate(**body) for body in bodies]
    with engines(model, {**flags, "chunked_prefill_size": 64}, {**flags, **joined}) as pair:
        begun = [pair.start(**body)[1] for body in bodies]
        found = [each.result(WAIT_S) for each in begun]
        for mine, whole in zip(found, right, strict=True):
            assert mine["output_ids"] == whole["output_ids"]
            values, close = (
                [v for v, *_ in x["meta_info"]["output_token_logprobs"]] for x in (mine, whole)
            )
            assert values == pytest.approx(close, abs=1e-4)
        assert sum(map(correct, found)) > 10, "drafts came true"
        wait_until(lambda: is_whole(pair.prefill) and is_whole(pair.decode), WAIT_S, "all back")
        before = pair.decode.stats().computed_tokens
        pair.ask(input_ids=[7, *PROMPT], sampling_params={**GREEDY, "max_new_tokens": 2})
        wait_until(lambda: is_whole(pair.decode), WAIT_S, "rest")
        assert pair.decode.stats().computed_tokens - before < 301 % 16 + 16, "the prompt came"


def correct(answer: dict) -> int:
    return answer["meta_info"]["spec_num_correct_drafts"]


@pytest.mark.skipif(not ALL, reason="make test-parallel")
def test_a_draft_model_that_only_one_side_has_is_reported(tiny_model: Path, tmp_path: Path) -> None:
    model = with_words("deepseek v3", tmp_path / "model", tiny_model)
    with engines(model, {}, {"speculative_algorithm": "NEXTN"}) as uneven:
        _, second = uneven.start(input_ids=PROMPT, sampling_params=GREEDY)
        with pytest.raises(BanyanError, match="draft model differs"):
            second.result(WAIT_S)
