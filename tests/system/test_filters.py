"""Filters of logits give the same tokens alone, in a batch, in chunks, with drafts and in steps of
several tokens, on one rank and on two."""

import pytest

from tests.support.pools import EnginePool
from tests.system.handing import FLAGS

PROMPTS = [[5, 9, 11, 5, 9, 11, 5, 9], [7] * 12, [30 + 3 * i for i in range(40)]]
PARAMS = {
    "max_new_tokens": 32,
    "temperature": 0.8,
    "sampling_seed": 5,
    "ignore_eos": True,
    "dry_multiplier": 1.0,
    "dry_allowed_length": 1,
    "dry_sequence_breakers": [],
    "typical_p": 0.9,
    "xtc_probability": 0.4,
    "xtc_threshold": 0.01,
    "dynatemp_range": 0.3,
    "top_n_sigma": 3,
}
LAYOUTS = {
    "drafts": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
    "chunks": {"chunked_prefill_size": 4},
    "several tokens a step": {"num_continuous_decode_steps": 4},
    "two ranks": {"tp": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_filtered_tokens_do_not_depend_on_how_they_are_computed(
    name: str, tiny_model, engine_pool: EnginePool, single
) -> None:
    def ids(engine, prompts) -> list[list[int]]:
        answers = engine.generate(input_ids=prompts, sampling_params=PARAMS)
        return [answer["output_ids"] for answer in answers]

    expected = [ids(single, [prompt])[0] for prompt in PROMPTS]
    assert expected != [
        single.generate(input_ids=prompt, sampling_params={k: PARAMS[k] for k in list(PARAMS)[:4]})[
            "output_ids"
        ]
        for prompt in PROMPTS
    ]
    with engine_pool.borrow(tiny_model, **{**FLAGS, **LAYOUTS[name]}) as engine:
        assert ids(engine, PROMPTS) == expected
