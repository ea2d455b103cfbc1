"""Prompts of embeddings: rows of the model's own table stand for the tokens they belong to."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from banyan.base.errors import RequestError
from banyan.llm import Engine
from tests.system.checkpoint import CONTEXT, HIDDEN

PROMPT = [5 + 3 * i % 250 for i in range(45)]
SHORT = PROMPT[:7]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": 8, "ignore_eos": True}
FLAGS = {"engine_mode": "inprocess", "threads": 1, "page_size": 8, "chunked_prefill_size": 16}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    more = {"max_total_tokens": 4096, "enable_return_hidden_states": True}
    with Engine(str(tiny_model), **FLAGS, **more) as it:
        yield it


@pytest.fixture(scope="module")
def table(tiny_model: Path) -> np.ndarray:
    """The embedding table of the checkpoint, [vocab, hidden]."""
    return load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]


def rows(table: np.ndarray, tokens: list[int]) -> list[list[float]]:
    return table[tokens].tolist()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_embeddings_of_tokens_give_the_answer_of_the_tokens(engine, table, params):
    fields = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": 3}
    expected = engine.generate(input_ids=PROMPT, **fields)
    answer = engine.generate(input_embeds=rows(table, PROMPT), **fields)
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["text"] == engine.tokenizer.decode(answer["output_ids"]), "a text of its own"
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert answer["meta_info"][name] == expected["meta_info"][name]
    assert answer["meta_info"]["prompt_tokens"] == len(PROMPT)


def test_a_batch_of_embeddings_runs_next_to_prompts_of_tokens(engine, table):
    prompts = [PROMPT, SHORT, PROMPT[3:20]]
    expected = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    embeds = [rows(table, p) for p in prompts]
    streams = [
        engine.generate(input_embeds=embeds, sampling_params=GREEDY, stream=True),
        engine.generate(input_ids=prompts, sampling_params=GREEDY, stream=True),
    ]
    ends: list[dict[int, list[int]]] = [{}, {}]
    for pair in zip(*streams, strict=False):
        for end, answer in zip(ends, pair, strict=True):
            end[answer["index"]] = answer["output_ids"]
    for end, stream in zip(ends, streams, strict=True):
        end |= {answer["index"]: answer["output_ids"] for answer in stream}
    assert ends[0] == ends[1] == {i: a["output_ids"] for i, a in enumerate(expected)}


def test_other_embeddings_share_no_prefix_and_equal_ones_do(engine, table):
    first, other = table[PROMPT], table[PROMPT].copy()
    other[0] += 0.5
    one = engine.generate(input_embeds=first.tolist(), sampling_params=GREEDY)
    cold = engine.generate(input_embeds=other.tolist(), sampling_params=GREEDY)
    assert cold["meta_info"]["cached_tokens"] == 0
    again = engine.generate(input_embeds=first.tolist(), sampling_params=GREEDY)
    assert again["meta_info"]["cached_tokens"] >= 32
    assert again["output_ids"] == one["output_ids"]
    zeros = engine.generate(input_ids=[0] * len(PROMPT), sampling_params=GREEDY)
    assert zeros["meta_info"]["cached_tokens"] == 0, "the placeholders were taken for tokens"


def test_embeddings_that_no_token_has_agree_with_transformers(engine, tiny_model, table):
    from transformers import AutoModelForCausalLM

    given = (table[PROMPT] + table[PROMPT[::-1]]) * 0.5
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = reference(inputs_embeds=torch.from_numpy(given)[None], output_hidden_states=True)
    with Engine(
        str(tiny_model), **FLAGS, cpu_activations="fp32", enable_return_hidden_states=True
    ) as exact:
        answer = exact.generate(
            input_embeds=given.tolist(),
            sampling_params=GREEDY | {"max_new_tokens": 1},
            return_hidden_states=True,
        )
    states = np.array(answer["meta_info"]["hidden_states"][0])
    assert np.allclose(states, expected.hidden_states[-1][0].numpy(), rtol=0, atol=1e-4)
    assert answer["output_ids"] == [int(expected.logits[0, -1].argmax())]


def test_a_retracted_prompt_of_embeddings_is_computed_again(tiny_model, table):
    params = {"temperature": 0, "max_new_tokens": 48, "min_new_tokens": 48}
    prompts = [PROMPT[i : i + 20] for i in range(12)]
    small = FLAGS | {"max_total_tokens": 320, "schedule_conservativeness": 0.0}
    with Engine(str(tiny_model), **small) as engine:
        answers = engine.generate(
            input_embeds=[rows(table, p) for p in prompts], sampling_params=params
        )
        assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0
        alone = [engine.generate(input_ids=p, sampling_params=params) for p in prompts]
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in alone]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "rows of 64 numbers"),
        ("x", "rows of 64 numbers"),
        ([0.5] * HIDDEN, "rows of 64 numbers"),
        ([[0.5] * (HIDDEN - 1)], "63 numbers at position 0"),
        ([[0.5] * HIDDEN, [0.5] * (HIDDEN + 1)], "65 numbers at position 1"),
        ([[0.5] * (HIDDEN - 1) + [None]], "numbers, got something else at position 0"),
        ([[0.5] * (HIDDEN - 1) + [True]], "numbers, got something else at position 0"),
        ([[0.5] * (HIDDEN - 1) + [float("nan")]], "finite"),
        ([[0.5] * (HIDDEN - 1) + [1e39]], "finite"),
        ([[0.5] * (HIDDEN - 1) + [10**400]], "finite"),
        ([[[0.5] * HIDDEN], []], "rows of 64 numbers"),
        ([[0.0] * HIDDEN] * CONTEXT, f"{CONTEXT} tokens"),
    ],
)
def test_embeddings_of_another_shape_are_refused(engine, given, words):
    with pytest.raises(RequestError, match=words) as caught:
        engine.generate(input_embeds=given, sampling_params=GREEDY)
    assert caught.value.status == 400 and caught.value.param == "input_embeds"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input_ids": SHORT}, "input_ids"),
        ({"text": "a"}, "text"),
        ({"return_prompt_token_ids": True}, "return_prompt_token_ids"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"sampling_params": {"repetition_penalty": 1.1}}, "repetition_penalty"),
    ],
)
def test_what_would_read_the_tokens_of_the_prompt_is_refused(engine, table, fields, name):
    with pytest.raises(RequestError, match=name) as caught:
        engine.generate(**{"input_embeds": rows(table, SHORT), **fields})
    assert caught.value.param == name


def test_penalties_of_the_output_still_count(engine, table):
    params = GREEDY | {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    expected = engine.generate(input_ids=SHORT, sampling_params=params)
    answer = engine.generate(input_embeds=rows(table, SHORT), sampling_params=params)
    assert answer["output_ids"] == expected["output_ids"]
