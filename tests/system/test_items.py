"""Items of /v1/score: each is read behind the query alone, and the query is computed once."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.server.scores import JUDGE
from tests.system.serving import Server, serving, settled

QUERY = [5 + 3 * i % 250 for i in range(320)]
ITEMS = [[7 + i + j * j % 200 for j in range(1 + 5 * i)] for i in range(8)]
LABELS = [11, 12, 200]
DELIMITER = 1


@pytest.fixture(scope="module")
def scoring(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("scoring") / "server.log"
    model = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "8192")
    with serving(log, *model, "--cpu-activations", "fp32") as running:
        yield running


def score(server: Server, items: list[list[int]], **more: object) -> list[list[float]]:
    body = {"query": QUERY, "items": items, "label_token_ids": LABELS, **more}
    answer = server.http.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["scores"]


def test_a_query_is_computed_once_for_all_its_items(scoring):
    before = scoring.stats()
    score(scoring, ITEMS)
    after = settled(scoring.stats, before["finished"] + len(ITEMS))
    computed = after["computed_tokens"] - before["computed_tokens"]
    own = sum(map(len, ITEMS))
    assert len(QUERY) + own <= computed <= len(QUERY) + own + 16 * len(ITEMS)


def test_items_score_alone_as_they_do_together_and_as_the_reference_says(scoring, tiny_model):
    from transformers import AutoModelForCausalLM

    together = score(scoring, ITEMS)
    alone = [score(scoring, [item])[0] for item in ITEMS]
    assert together == alone
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [reference(torch.tensor([QUERY + item])).logits[0, -1] for item in ITEMS]
    probabilities = torch.stack(logits).softmax(-1)[:, LABELS].numpy()
    assert np.allclose(together, probabilities, rtol=1e-4, atol=1e-7)
    among = probabilities / probabilities.sum(1, keepdims=True)
    assert np.allclose(score(scoring, ITEMS, apply_softmax=True), among, rtol=1e-4, atol=1e-7)


def test_no_items_have_no_scores(scoring):
    body = {"query": QUERY, "items": [], "label_token_ids": LABELS}
    answer = scoring.http.post("/v1/score", json=body)
    assert answer.status_code == 200 and answer.json()["scores"] == []
    assert answer.json()["usage"]["prompt_tokens"] == 0


def test_a_delimiter_stands_between_query_and_item(scoring, tiny_model, tmp_path):
    """Whoever puts it there by hand gets the same scores."""
    flags = ("--threads", "1", "--cpu-activations", "fp32", "--max-total-tokens", "8192")
    own = ("--multi-item-scoring-delimiter", str(DELIMITER))
    with serving(tmp_path / "log", "--model-path", str(tiny_model), *flags, *own) as server:
        found = score(server, ITEMS[:3])
        backwards = score(server, ITEMS[:3], item_first=True)
    assert (
        found == score(scoring, ITEMS[:3], query=[*QUERY, DELIMITER]) != score(scoring, ITEMS[:3])
    )
    by_hand = [[*item, DELIMITER] for item in ITEMS[:3]]
    assert backwards == score(scoring, by_hand, item_first=True)


def test_the_switch_for_many_items_reports_to_have_nothing_left_to_do():
    (note,) = parse(["--enable-mis"], Environment()).observe.notes
    assert "share the query through the prefix cache" in note


DOCUMENTS = ["A banyan grows new roots.", "A server keeps pages of keys and values."]


def test_a_chat_model_ranks_documents_by_how_likely_it_says_yes(demo_server):
    """The probabilities of the first token of a chat with the judge's prompt."""
    http = demo_server.http
    asked = {"query": "What grows new roots?", "documents": DOCUMENTS, "instruct": "Find facts"}
    ranked = http.post("/v1/rerank", json=asked).json()
    for entry in ranked:
        text = f"<Instruct>: Find facts\n<Query>: {asked['query']}\n<Document>: {entry['document']}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
        ids = [
            http.post("/tokenize", json={"prompt": word, "add_special_tokens": False}).json()
            for word in ("yes", "no")
        ]
        scored = http.post(
            "/v1/chat/completions",
            json={
                "messages": messages,
                "max_tokens": 1,
                "temperature": 1,
                "logprobs": True,
                "top_logprobs": 20,
                "logit_bias": {str(each["tokens"][0]): 60 for each in ids},
            },
        ).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        likely = {one["token"]: math.exp(one["logprob"]) for one in scored}
        among = likely["yes"] / (likely["yes"] + likely["no"])
        assert math.isclose(entry["score"], among, rel_tol=1e-3)
    assert [e["score"] for e in ranked] == sorted((e["score"] for e in ranked), reverse=True)
    refused = http.post("/v1/rerank", json={**asked, "documents": ["x " * 200_000]})
    assert refused.status_code == 400 and "longer than" in refused.json()["message"]
