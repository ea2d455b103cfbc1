"""Pairs of servers with adapters, drafts, and caches and weights of all kinds answer like one."""

import os
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.adapters import write_adapter
from tests.system.handing import WAIT_S, Pair, engines
from tests.system.serving import wait_until
from tests.system.test_handoff import FLAGS, GREEDY, PROMPT, is_whole, told

ALL = bool(os.environ.get("PARALLEL"))
SEEDED = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 12}
REPEATING = [(x % 9) * 11 + 20 for x in range(150)]
KINDS = {
    "NGRAM drafts": {"speculative_algorithm": "NGRAM"},
    "int8 pages": {"kv_cache_dtype": "int8"},
    "fp8 pages": {"kv_cache_dtype": "fp8_e4m3"},
    "weights of 8 bits": {"quantization": "int8"},
}


def check(pair: Pair, single: Engine, **more: object) -> None:
    """Greedy and by seed, with scores, from nothing and from what both have cached."""
    for params in (GREEDY, SEEDED):
        for prompt in (REPEATING, PROMPT[:100], PROMPT):
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **more}
            assert told(pair.ask(**body)) == told(single.generate(**body))
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
        first, second = pair.start(input_ids=PROMPT, sampling_params=GREEDY, lora_path="b")
        with pytest.raises(BanyanError, match="or with other weights"):
            second.result(WAIT_S)
        first.result(WAIT_S)


@pytest.mark.skipif(not ALL, reason="make test-parallel")
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_of_caches_and_weights_are_handed_over(kind: str, tiny_model: Path) -> None:
    flags = KINDS[kind]
    with (
        engines(tiny_model, {**flags, "chunked_prefill_size": 64}, flags) as pair,
        Engine(str(tiny_model), **FLAGS, **flags) as single,
    ):
        check(pair, single)
