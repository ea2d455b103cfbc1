"""Log-probabilities of outputs are those of the distribution that a token is drawn from."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import banyan
from tests.system.checkpoint import write_tiny_model

PROMPT = "The quick brown"
EXCLUDED = -9999.0
FLAGS = {"engine_mode": "inprocess", "max_total_tokens": 2048, "cpu_activations": "fp32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("logprobs") / "model")


@pytest.fixture(scope="module")
def logits_of(model: Path):
    """Raw logits after these ids, by transformers."""
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits_of(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return oracle(torch.tensor([ids])).logits[0, -1].numpy()

    return logits_of


@pytest.fixture(scope="module")
def engine(model: Path):
    with banyan.Engine(str(model), **FLAGS) as engine:
        yield engine


def values(engine: banyan.Engine, **sampling: object):
    """Output ids, their values, and the values of the whole vocabulary at each output."""
    everything = list(range(engine.tokenizer.vocab_size))
    answer = engine.generate(
        PROMPT,
        {"max_new_tokens": 5, "ignore_eos": True, **sampling},
        return_logprob=True,
        token_ids_logprob=everything,
    )
    meta = answer["meta_info"]
    rows = [[value for value, *_ in row] for row in meta["output_token_ids_logprobs"]]
    own = [value for value, *_ in meta["output_token_logprobs"]]
    return answer["output_ids"], np.array(own), np.array(rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    high = logits.max(-1, keepdims=True)
    return logits - high - np.log(np.exp(logits - high).sum(-1, keepdims=True))


CASES = {
    "bias": {"logit_bias": {"5": 4.0, "9": -3.0}},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.7, "sampling_seed": 3},
    "temperature": {"temperature": 0.4, "sampling_seed": 3},
    "stop tokens below min_new_tokens": {"min_new_tokens": 5, "stop_token_ids": [7, 8]},
}


@pytest.mark.parametrize("sampling", CASES.values(), ids=CASES)
def test_outputs_are_scored_by_the_distribution_they_are_drawn_from(
    engine: banyan.Engine, logits_of, sampling: dict[str, object]
) -> None:
    sampling = {"temperature": 0, **sampling}
    ids, own, rows = values(engine, **sampling)
    prompt = engine.tokenizer.encode(PROMPT)
    for at in range(len(ids)):
        raw = logits_of(prompt + ids[:at])
        expected = log_softmax(_edited(raw, prompt, ids[:at], sampling))
        expected = np.maximum(expected, EXCLUDED)
        np.testing.assert_allclose(rows[at], expected, atol=1e-3)
        assert own[at] == pytest.approx(expected[ids[at]], abs=1e-3)


def test_a_grammar_s_mask_is_part_of_the_distribution(engine: banyan.Engine) -> None:
    ids, own, rows = values(engine, temperature=0, regex="(Yes|No)", max_new_tokens=1)
    allowed = rows[0] > EXCLUDED
    assert 0 < allowed.sum() < len(rows[0]) // 2
    assert np.exp(rows[0][allowed]).sum() == pytest.approx(1, abs=1e-3)
    assert own[0] == rows[0].max() == rows[0][ids[0]]


def test_a_variable_reports_the_raw_values(
    model: Path, engine: banyan.Engine, logits_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = {"temperature": 0.5, "sampling_seed": 1, "regex": "(Yes|No)", "max_new_tokens": 1}
    raw = log_softmax(logits_of(engine.tokenizer.encode(PROMPT)))
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    with banyan.Engine(str(model), **FLAGS) as other:
        _, _, rows = values(other, **sampling)
    np.testing.assert_allclose(rows[0], raw, atol=1e-3)
    _, _, edited = values(engine, **sampling)
    assert np.abs(edited[0] - raw).max() > 1


def _edited(
    logits: np.ndarray, prompt: list[int], outputs: list[int], sampling: dict
) -> np.ndarray:
    """The edits, one token at a time, from their definition."""
    logits = logits.copy()
    repetition = sampling.get("repetition_penalty", 1.0)
    for token in range(len(logits)):
        count = outputs.count(token)
        if count:
            logits[token] -= sampling.get("frequency_penalty", 0) * count
            logits[token] -= sampling.get("presence_penalty", 0)
        if count or token in prompt:
            is_positive = logits[token] > 0
            logits[token] *= 1 / repetition if is_positive else repetition
    for token, bias in sampling.get("logit_bias", {}).items():
        logits[int(token)] += bias
    for token in sampling.get("stop_token_ids", []):
        logits[token] = -np.inf
    return logits / (sampling["temperature"] or 1)
