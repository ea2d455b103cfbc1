"""lm-eval against a server on the demo model: it gets the scores of the server's own routes."""

import json
import math

import pytest

from banyan.config.env import read_environment
from banyan.config.schema import DEMO, LoadConfig
from banyan.hub.sources import fetch
from banyan.tokenizer.load import load_tokenizer
from tests.clients.conftest import Ask, Facts, Servers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """lm-eval counts tokens with a tokenizer of transformers, in a folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = load_tokenizer(fetch(LoadConfig(source=DEMO), read_environment()))
    tokenizer.copy_of_backend().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ask("lm-eval", "lm_eval_facts.py", TOKENIZER=str(folder))


def loglikelihood(servers: Servers, context: str, rest: str) -> float:
    """Of `rest` after `context`, from the log-probabilities of /generate."""
    first = servers.count(prompt=context) if context else 0
    params = {"max_new_tokens": 1, "temperature": 0}
    body = {"text": context + rest, "return_logprob": True, "logprob_start_len": 0}
    answer = servers.chat.http.post("/generate", json={**body, "sampling_params": params})
    scores = answer.json()["meta_info"]["input_token_logprobs"][first:]
    return sum(score for score, *_ in scores if score is not None)


def test_choices_are_scored_as_the_server_scores_them(facts: Facts, servers: Servers):
    for sample in facts["choices"]["samples"]:
        assert len(sample["asked"]) == len(sample["got"]) == 3
        for (context, rest), ((found, is_greedy),) in zip(
            sample["asked"], sample["got"], strict=True
        ):
            assert float(found) == pytest.approx(loglikelihood(servers, context, rest), abs=1e-3)
            assert str(is_greedy) in ("True", "False")
    assert facts["choices"]["results"]["acc,none"] >= 2 / 3


def test_whole_texts_are_scored(facts: Facts):
    found = facts["rolling"]
    words = sum(len(s["asked"][0][0].split()) for s in found["samples"])
    total = sum(float(s["got"][0][0]) for s in found["samples"])
    perplexity = found["results"]["word_perplexity,none"]
    assert perplexity == pytest.approx(math.exp(-total / words), rel=1e-3) and perplexity > 1


@pytest.mark.parametrize("kind", ["written", "chat"])
def test_answers_are_written_up_to_the_stops_of_the_task(facts: Facts, servers: Servers, kind: str):
    for sample, text in zip(
        facts[kind]["samples"], ("The sun rises in the", "Once upon a"), strict=True
    ):
        body = {"model": "demo", "max_tokens": 12, "temperature": 0, "stop": ["\n", "."]}
        if kind == "chat":
            body["messages"] = [{"role": "user", "content": text}]
            path, read = "/v1/chat/completions", lambda choice: choice["message"]["content"]
        else:
            body["prompt"] = text
            path, read = "/v1/completions", lambda choice: choice["text"]
        answer = servers.chat.http.post(path, json=body).json()
        assert sample["got"] == [[read(answer["choices"][0])]]
