"""Embeddings end to end: the official client and the native route, against plain transformers."""

import base64
import contextlib
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse

from tests.support import checkpoints
from tests.system.serving import Server, serving, wait_until

TEXTS = [
    "A banyan grows new roots.",
    "hello",
    "Pages of keys and values are shared by requests with the same prefix. " * 8,
]
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def mini_lm() -> Path:
    return checkpoints.mini_lm()


@pytest.fixture(scope="module")
def encoder(mini_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("encoder") / "server.log"
    flags = ("--model-path", str(mini_lm), "--threads", "1", "--cpu-activations", "fp32")
    with serving(log, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(encoder: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=encoder.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


@pytest.fixture(scope="module")
def expected(mini_lm: Path) -> np.ndarray:
    """Mean of the last hidden states, of length one, by transformers; [texts, 384]."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(mini_lm), AutoModel.from_pretrained(mini_lm)
    with torch.no_grad():
        found = [
            model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
            for text in TEXTS
        ]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1).numpy()


def test_the_first_request_that_the_log_suggests_is_answered(encoder: Server) -> None:
    def suggested() -> str:
        lines = encoder.log.read_text().splitlines()
        return next((line for line in lines if "try: curl" in line), "")

    wait_until(lambda: bool(suggested()), 60.0, "the log suggests no request")
    line = suggested()
    words = shlex.split(line.partition("try: curl ")[2])
    answer = httpx.post(words[0], content=words[-1], headers=[words[2].split(": ")])
    assert answer.status_code == 200 and answer.json()["data"][0]["embedding"]


def test_an_answer_fits_the_official_types_strictly(encoder: Server):
    answer = encoder.http.post("/v1/embeddings", json={"input": TEXTS, "model": "default"})
    CreateEmbeddingResponse.model_validate_json(answer.content, strict=True)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_the_official_client_gets_the_vectors_of_the_reference(client, expected, form):
    answer = client.embeddings.create(model="default", input=TEXTS, encoding_format=form)
    found = [e.embedding for e in answer.data]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
    assert np.allclose(np.array(found), expected, **CLOSE)
    assert [e.index for e in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)


def test_what_the_client_asks_for_by_itself_is_the_same(client, expected):
    answer = client.embeddings.create(model="default", input=TEXTS[0])
    assert np.allclose(answer.data[0].embedding, expected[0], **CLOSE)


def test_token_ids_stand_for_the_text_they_came_from(client, encoder, expected):
    body = {"prompt": TEXTS[1]}
    ids = encoder.http.post("/v1/tokenize", json=body).json()["tokens"]
    answer = client.embeddings.create(model="default", input=ids)
    assert np.allclose(answer.data[0].embedding, expected[1], **CLOSE)


def test_fewer_dimensions_are_the_first_ones_of_length_one(client, expected):
    answer = client.embeddings.create(model="default", input=TEXTS[0], dimensions=64)
    cut = expected[0][:64]
    assert np.allclose(answer.data[0].embedding, cut / np.linalg.norm(cut), **CLOSE)


def test_the_native_route_gives_the_same_alone_and_in_a_list(encoder, expected):
    one = encoder.http.post("/encode", json={"text": TEXTS[0]}).json()
    many = encoder.http.post("/encode", json={"text": TEXTS}).json()
    assert np.allclose(one["embedding"], expected[0], **CLOSE)
    assert np.allclose([a["embedding"] for a in many], expected, **CLOSE)
    assert many[0]["meta_info"]["prompt_tokens"] == one["meta_info"]["prompt_tokens"]


def test_equal_beginnings_do_not_share_what_an_encoder_has_seen(encoder, expected):
    for _ in range(2):
        answers = [TEXTS[2], TEXTS[2][: len(TEXTS[2]) // 2], TEXTS[2]]
        found = encoder.http.post("/encode", json={"text": answers}).json()
        assert np.allclose(found[0]["embedding"], expected[2], **CLOSE)
        assert np.allclose(found[2]["embedding"], expected[2], **CLOSE)
        assert [a["meta_info"]["cached_tokens"] for a in found] == [0, 0, 0]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/embeddings", {"input": ""}, "empty"),
        ("/v1/embeddings", {"input": []}, "input must be"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input must be"),
        ("/v1/embeddings", {"input": [[30522]]}, "30522"),
        ("/v1/embeddings", {"input": "word " * 600}, "longer than the model's context length"),
        ("/v1/embeddings", {"input": "a", "dimensions": 385}, "dimensions must be in"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/encode", {"text": "a", "image_data": "x"}, "image_data"),
        ("/encode", {}, "Exactly one of"),
        ("/generate", {"text": "a"}, "served for embeddings"),
        ("/v1/completions", {"prompt": "a"}, "served for embeddings"),
        ("/v1/classify", {"input": "a"}, "no head that scores classes"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, "no head that scores classes"),
        ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}, "for embeddings"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(encoder, path, body, text):
    answer = encoder.http.post(path, json=body)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_the_model_says_that_it_does_not_generate(encoder):
    assert encoder.http.get("/model_info").json()["is_generation"] is False
    assert encoder.http.get("/health_generate").status_code == 200


def test_a_causal_model_gives_its_last_state(tiny_model, tmp_path):
    from transformers import AutoModel

    flags = ("--is-embedding", "--chunked-prefill-size", "16", "--cpu-activations", "fp32")
    ids = [5 + i % 400 for i in range(70)]
    base = ("--model-path", str(tiny_model), "--threads", "1", "--max-total-tokens", "4096")
    with serving(tmp_path / "server.log", *base, *flags) as server:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
            found = [client.embeddings.create(model="m", input=ids).data[0] for _ in range(2)]
        again = server.http.post("/encode", json={"input_ids": ids}).json()
    with torch.no_grad():
        state = AutoModel.from_pretrained(tiny_model)(torch.tensor([ids])).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(state, dim=-1).numpy()
    assert np.allclose([f.embedding for f in found], expected, **CLOSE)
    assert np.allclose(again["embedding"], expected, **CLOSE)
    assert again["meta_info"]["cached_tokens"] > 0


def test_a_model_for_text_names_the_flag_it_lacks(shared_server):
    answer = shared_server.http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 400
    assert "--is-embedding" in answer.json()["error"]["message"]


def test_label_tokens_score_as_their_log_probabilities_do(shared_server):
    query, items, labels = "One two three", [" four", " banyan tree"], [7, 300, 41]
    body = {"query": query, "items": items, "label_token_ids": labels}
    answer = shared_server.http.post("/v1/score", json=body).json()
    assert answer["object"] == "scoring"
    tokenize = shared_server.http.post
    for item, scores in zip(items, answer["scores"], strict=True):
        parts = [
            tokenize("/v1/tokenize", json={"prompt": t}).json()["tokens"] for t in (query, item)
        ]
        generated = shared_server.generate(
            input_ids=parts[0] + parts[1],
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            return_logprob=True,
            token_ids_logprob=labels,
        )
        picked = generated["meta_info"]["output_token_ids_logprobs"][0]
        assert np.allclose(scores, np.exp([p[0] for p in picked]), rtol=1e-4)
    shared = shared_server.http.post("/v1/score", json=body | {"apply_softmax": True}).json()
    assert np.allclose(np.sum(shared["scores"], axis=1), 1.0)
    assert answer["usage"]["prompt_tokens"] > 0


@pytest.fixture
def cross_encoder(mini_lm: Path, tmp_path: Path):
    """serve(labels) -> (a server on a random cross-encoder, what transformers scores pairs)."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    @contextlib.contextmanager
    def serve(labels: int):
        torch.manual_seed(5)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = BertConfig(
            **sizes, num_attention_heads=4, num_labels=labels, initializer_range=0.4
        )
        model = BertForSequenceClassification(config).eval()
        tokenizer, folder = AutoTokenizer.from_pretrained(mini_lm), tmp_path / "model"
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(mini_lm / name, folder)

        def scores(pairs: list[tuple[str, str]]) -> np.ndarray:
            with torch.no_grad():
                found = [model(**tokenizer(*pair, return_tensors="pt")).logits[0] for pair in pairs]
            return torch.stack(found).numpy()

        flags = ("--model-path", str(folder), "--threads", "1", "--cpu-activations", "fp32")
        with serving(tmp_path / "server.log", *flags) as server:
            yield server, scores

    return serve


QUERY = "What grows new roots?"
DOCUMENTS = ["A banyan grows new roots.", "A server keeps pages.", "hello", "Roots of numbers."]


def test_a_cross_encoder_ranks_documents_best_first(cross_encoder):
    with cross_encoder(1) as (server, scores):
        logits = scores([(QUERY, document) for document in DOCUMENTS])[:, 0]
        body = {"query": QUERY, "documents": DOCUMENTS}
        ranked = server.http.post("/v1/rerank", json=body).json()
        best = server.http.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": False})
        results = server.http.post("/v2/rerank", json=body | {"top_n": 2}).json()
        whole = server.http.post("/rerank", json=body | {"return_documents": True}).json()
        reverse = {"query": QUERY, "items": DOCUMENTS[:2], "item_first": True}
        turned = server.http.post("/v1/score", json=reverse).json()["scores"]
        pair = server.http.post("/classify", json={"text": [[QUERY, DOCUMENTS[0]]]}).json()
        turned_logits = scores([(document, QUERY) for document in DOCUMENTS[:2]])
    assert [entry["index"] for entry in ranked] == np.argsort(-logits).tolist()
    expected = {i: 1 / (1 + np.exp(-logit)) for i, logit in enumerate(logits)}
    for entry in ranked:
        assert entry["document"] == DOCUMENTS[entry["index"]]
        assert np.isclose(entry["score"], expected[entry["index"]], **CLOSE)
    assert [(e["index"], e["document"]) for e in best.json()] == [(ranked[0]["index"], None)]
    assert [r["index"] for r in results["results"]] == [entry["index"] for entry in ranked[:2]]
    assert [r["relevance_score"] for r in results["results"]] == [e["score"] for e in ranked[:2]]
    assert "document" not in results["results"][0] and results["usage"]["prompt_tokens"] > 0
    assert whole["results"][0]["document"] == {"text": ranked[0]["document"]}
    assert np.allclose(turned, turned_logits, **CLOSE)
    assert np.allclose(pair[0]["embedding"], logits[:1], **CLOSE)


def test_a_classifier_names_the_likeliest_class(cross_encoder):
    with cross_encoder(3) as (server, _):
        answer = server.http.post("/v1/classify", json={"input": DOCUMENTS}).json()
        raw = server.http.post("/classify", json={"text": DOCUMENTS}).json()
        refused = server.http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert refused.status_code == 400 and "this model has 3" in refused.json()["message"]
    for entry, scores in zip(answer["data"], raw, strict=True):
        weights = np.exp(scores["embedding"])
        assert np.allclose(entry["probs"], weights / weights.sum(), **CLOSE)
        assert entry["label"] == f"LABEL_{int(np.argmax(weights))}"
        assert entry["num_classes"] == 3
