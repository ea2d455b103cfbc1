"""Adapters of models that make vectors or score classes: each against PEFT's merged model."""

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from banyan.lora.adapter_config import WEIGHTS
from tests.support.lora import merge, write_adapter
from tests.system.serving import Server, serving

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
PROMPTS = [[5, 17, 23, 9], [(7 * i * i + 3 * i) % 61 for i in range(70)], [5, 9]]
BLOCKS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        model, adapted: classes that the base is saved by and the adapters are made for.
        lora: what the adapters are.
        flags: of the start.
    """

    model: str
    config: Mapping[str, object]
    adapted: str
    lora: Mapping[str, object]
    flags: Mapping[str, object]


GROUPED = {"num_key_value_heads": 2, "pad_token_id": 0}
CASES = {
    "a body, DoRA, not recorded": Case(
        *("Qwen3Model", GROUPED | {"head_dim": 8}, "AutoModel"),
        {"target_modules": BLOCKS, "task_type": "FEATURE_EXTRACTION", "use_dora": True},
        {"disable_cuda_graph": True},
    ),
    "a body and its embedding": Case(
        *("LlamaModel", GROUPED, "AutoModel"),
        {"target_modules": [*BLOCKS, "embed_tokens"], "use_rslora": True},
        {"tp_size": 2},
    ),
    "a model for text, from its body": Case(
        *("LlamaForCausalLM", GROUPED, "AutoModel"),
        {"target_modules": BLOCKS, "task_type": "FEATURE_EXTRACTION"},
        {"is_embedding": True, "chunked_prefill_size": 16},
    ),
    "a model for text, whole": Case(
        *("LlamaForCausalLM", GROUPED, "AutoModelForCausalLM"),
        {"target_modules": BLOCKS, "task_type": "CAUSAL_LM"},
        {"is_embedding": True},
    ),
    "classes": Case(
        *("Qwen2ForSequenceClassification", GROUPED | {"num_labels": 3}),
        "AutoModelForSequenceClassification",
        {"target_modules": BLOCKS, "task_type": "SEQ_CLS"},
        {},
    ),
    "classes, two ranks": Case(
        *("LlamaForSequenceClassification", GROUPED | {"num_labels": 2}),
        "AutoModelForSequenceClassification",
        {"target_modules": [*BLOCKS, "score"], "use_rslora": True},
        {"tp_size": 2},
    ),
    "classes of an encoder, two ranks": Case(
        *("BertForSequenceClassification", {"type_vocab_size": 2, "num_labels": 3}),
        "AutoModelForSequenceClassification",
        {"target_modules": ["query", "value", "dense"], "task_type": "SEQ_CLS"},
        {"tp_size": 2},
    ),
    "classes of another encoder": Case(
        *("RobertaForSequenceClassification", {"pad_token_id": 1, "num_labels": 2}),
        "AutoModelForSequenceClassification",
        {"target_modules": ["key", "output.dense"], "task_type": "SEQ_CLS"},
        {},
    ),
    "an encoder": Case(
        *("BertModel", {"type_vocab_size": 2}, "AutoModel"),
        {"target_modules": ["query", "value", "dense"], "task_type": "FEATURE_EXTRACTION"},
        {},
    ),
}


def save_base(case: Case, folder: Path) -> Path:
    import transformers

    torch.manual_seed(3)
    kind = getattr(transformers, case.model)
    model = kind(kind.config_class(**SIZES, **case.config))
    model.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    return folder


def save_adapter(case: Case, base: Path, folder: Path, seed: int) -> np.ndarray:
    """A random one; returns what the base merged with it makes of PROMPTS."""
    import transformers

    peft = pytest.importorskip("peft")
    torch.manual_seed(100 + seed)
    model = getattr(transformers, case.adapted).from_pretrained(base)
    config = peft.LoraConfig(r=3 + seed, lora_alpha=6, init_lora_weights=False, **case.lora)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    return reference(adapted.merge_and_unload().eval())


def reference(model: torch.nn.Module) -> np.ndarray:
    """[prompts, width]: scores of classes, or the state that is a vector, of length one."""
    with torch.no_grad():
        if "Classification" in type(model).__name__:
            return torch.cat([model(torch.tensor([p])).logits for p in PROMPTS]).numpy()
        body = getattr(model, "model", model)
        at = 0 if type(body).__name__.startswith(("Bert", "Roberta")) else -1
        found = [body(torch.tensor([p])).last_hidden_state[0, at] for p in PROMPTS]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1).numpy()


def engine(model: Path, **flags: object) -> Engine:
    own = {"threads": 1, "max_total_tokens": 1024, "cpu_activations": "fp32"}
    own |= {"skip_tokenizer_init": True, "engine_mode": "inprocess"}
    return Engine(str(model), **own, **flags)


def rows(answers: list[dict[str, object]]) -> np.ndarray:
    return np.array([answer["embedding"] for answer in answers])


@pytest.mark.parametrize("name", CASES)
def test_vectors_and_scores_are_those_of_the_merged_model(name: str, tmp_path: Path) -> None:
    """Alone, then again from the cache, beside other adapters and none; the base's stay its own."""
    import transformers

    case = CASES[name]
    base = save_base(case, tmp_path / "base")
    plain = getattr(transformers, case.adapted).from_pretrained(base).eval()
    expected = {"": reference(plain)}
    for seed, adapter in enumerate("ab"):
        expected[adapter] = save_adapter(case, base, tmp_path / adapter, seed)
        assert np.abs(expected[adapter] - expected[""]).max() > 0.05
    paths = [f"{adapter}={tmp_path / adapter}" for adapter in "ab"]
    with engine(base, lora_paths=paths, **case.flags) as served:
        alone: dict[str, np.ndarray] = {}
        for adapter in expected:
            answers = [
                served.encode(prompt, lora_path=adapter) for prompt in (*PROMPTS, PROMPTS[1])
            ]
            alone[adapter] = rows(answers[:3])
            assert np.abs(alone[adapter] - expected[adapter]).max() < 1e-4
            seen = [answers[at]["meta_info"]["cached_tokens"] for at in (1, 3)]
            assert seen == [0, 0 if "encoder" in name else len(PROMPTS[1]) - 1]
            assert answers[3]["embedding"] == answers[1]["embedding"]
        company = ["a", "", "b", None, "b", "a"] * 3
        asked = [PROMPTS[at // 2 % 3] for at in range(len(company))]
        together = rows(served.encode(asked, lora_path=company))
        for at, adapter in enumerate(company):
            assert np.array_equal(together[at], alone[adapter or ""][at // 2 % 3])


def cut_out(adapter: Path, part: str) -> None:
    weights = load_file(adapter / WEIGHTS)
    kept = {name: tensor for name, tensor in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, adapter / WEIGHTS, metadata={"format": "pt"})


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """A head of other classes, one that lacks its bias or a half, a head where there is none, and
    an adapter that lacks what it says it has."""
    classes = CASES["classes"]
    base = save_base(classes, tmp_path / "base")
    two = replace(classes, config={**classes.config, "num_labels": 2})
    save_adapter(two, save_base(two, tmp_path / "two"), tmp_path / "a", 0)
    scored = CASES["classes of another encoder"]
    pair = save_base(scored, tmp_path / "pair")
    save_adapter(scored, pair, tmp_path / "b", 0)
    cut_out(tmp_path / "b", "classifier.out_proj.bias")
    save_adapter(scored, pair, tmp_path / "e", 0)
    cut_out(tmp_path / "e", "classifier.dense")
    states = save_base(replace(scored, model="RobertaModel"), tmp_path / "states")
    text = CASES["a model for text, whole"]
    body = save_base(text, tmp_path / "text")
    headed = replace(text, lora={"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    save_adapter(headed, body, tmp_path / "c", 0)
    cut = CASES["an encoder"]
    encoder = save_base(cut, tmp_path / "encoder")
    save_adapter(cut, encoder, tmp_path / "d", 0)
    cut_out(tmp_path / "d", "layer.1.attention.self.query")
    for model, adapter, flags, why in (
        (base, "a", {}, "scores 2 classes from 32 values, the base 3"),
        (body, "a", {}, "head of classes .score., and the base scores none"),
        (body, "a", {"is_embedding": True}, "the base scores none. Save the base as a model for"),
        (pair, "b", {}, "lacks classifier.out_proj.bias, which the base has"),
        (pair, "e", {}, "brings .*classifier.out_proj alone of a head of two projections"),
        (states, "b", {}, "head of classes .classifier., and the base scores none"),
        (encoder, "d", {}, "lacks the matrices of 1 projections.*layer.1.attention.self.query"),
        (body, "c", {"is_embedding": True}, "lm_head as a whole: only embed_tokens may be"),
    ):
        with pytest.raises(BanyanError, match=why):
            engine(model, lora_paths=[f"x={tmp_path / adapter}"], **flags)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def expected(tiny_model: Path, folders: dict[str, Path], tmp_path_factory) -> dict[str, np.ndarray]:
    """What transformers makes of PROMPTS with each adapter merged; "" for none."""
    from transformers import AutoModel

    root = tmp_path_factory.mktemp("merged")
    paths = {name: merge(tiny_model, folder, root / name) for name, folder in folders.items()}
    return {
        name: reference(AutoModel.from_pretrained(path).eval())
        for name, path in ({"": tiny_model} | paths).items()
    }


@pytest.fixture(scope="module")
def site(tiny_model: Path, folders: dict[str, Path], tmp_path_factory) -> Iterator[Server]:
    """Three adapters, of which two are in memory."""
    flags = ("--model-path", str(tiny_model), "--served-model-name", "base", "--is-embedding")
    flags += ("--threads", "1", "--max-total-tokens", "4096", "--cpu-activations", "fp32")
    flags += ("--max-lora-rank", "8", "--max-loaded-loras", "2", "--max-loras-per-batch", "2")
    flags += ("--lora-paths", f"a={folders['a']}", f"b={folders['b']}")
    with serving(tmp_path_factory.mktemp("site") / "server.log", *flags) as server:
        body = {"lora_name": "c", "lora_path": str(folders["c"])}
        assert server.http.post("/load_lora_adapter", json=body).status_code == 200
        yield server


def test_a_server_embeds_with_the_adapter_that_a_request_names(
    site: Server, expected: dict[str, np.ndarray], folders: dict[str, Path]
) -> None:
    def embedded(**fields: object) -> np.ndarray:
        answer = site.http.post("/v1/embeddings", json={"input": PROMPTS, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == fields["model"]
        return np.array([entry["embedding"] for entry in answer.json()["data"]])

    named: list[tuple[str, dict[str, object]]] = [
        *(("", {"model": "base"}), ("a", {"model": "a"}), ("b", {"model": "base:b"})),
        *(("c", {"model": "c"}), ("c", {"model": "base", "lora_path": str(folders["c"])})),
        ("b", {"model": "b", "lora_path": "b"}),
    ]
    with ThreadPoolExecutor(6) as pool:  # of three adapters two fit
        for (name, _), found in zip(
            named * 3, pool.map(lambda one: embedded(**one[1]), named * 3), strict=True
        ):
            assert np.abs(found - expected[name]).max() < 1e-4
    several = {"input_ids": PROMPTS, "lora_path": ["b", None, "a"]}
    found = rows(site.http.post("/encode", json=several).json())
    for at, name in enumerate(("b", "", "a")):
        assert np.abs(found[at] - expected[name][at]).max() < 1e-4
    texts = {"input": ["hi there", "you"]}
    plain = embedded(model="c", **texts)
    for model in ("c", "base:c", "c:latest"):
        answer = site.http.post("/api/embed", json={**texts, "model": model}).json()
        assert np.array_equal(answer["embeddings"], plain)
    old = site.http.post("/api/embeddings", json={"prompt": "hi there", "model": "c"}).json()
    assert np.array_equal(old["embedding"], plain[0])


@pytest.mark.parametrize(
    ("path", "fields", "status", "text"),
    [
        ("/v1/embeddings", {"model": "base:x"}, 404, "There are: a, b, c."),
        ("/v1/embeddings", {"model": "other:a"}, 404, "takes the adapter as base:a"),
        ("/v1/embeddings", {"model": "a", "lora_path": "b"}, 400, "names the adapter 'a'"),
        ("/v1/embeddings", {"lora_path": "../c"}, 400, "is not loaded"),
        ("/v1/embeddings", {"lora_path": ["a"]}, 400, "has 1 names for 2 prompts"),
        ("/v1/embeddings", {"lora_path": 7}, 400, "lora_path"),
        ("/encode", {"lora_path": ["a", "x"]}, 400, "There are: a, b, c."),
        ("/encode", {"model": "base:x"}, 404, "There are: a, b, c."),
    ],
)
def test_a_name_that_is_not_there_gets_the_list(
    site: Server, path: str, fields: dict[str, object], status: int, text: str
) -> None:
    ids = {"input_ids" if path == "/encode" else "input": PROMPTS[:2]}
    answer = site.http.post(path, json={**ids, **fields})
    assert answer.status_code == status and text in answer.text


def test_an_adapter_that_left_embeds_no_more_and_broke_nothing(site: Server, expected) -> None:
    body = {"input_ids": PROMPTS * 8, "lora_path": "b"}
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(site.http.post, "/encode", json=body) for _ in range(3)]
        left = site.http.post("/unload_lora_adapter", json={"lora_name": "b"})
    assert left.status_code == 200
    for answer in (one.result() for one in running):
        if answer.status_code == 200:
            assert np.abs(rows(answer.json())[:3] - expected["b"]).max() < 1e-4
        else:  # it came behind
            assert "There are: a, c." in answer.text
    gone = site.http.post("/v1/embeddings", json={"model": "b", "input": "x"})
    assert gone.status_code == 404 and "There are: a, c." in gone.text


def test_a_server_ranks_and_scores_with_an_adapters_own_head(tiny_model: Path, tmp_path: Path):
    """One class, over texts in pairs and alone; the head of each adapter is its own."""
    import transformers

    base = shutil.copytree(tiny_model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (base / "config.json").write_text(json.dumps({**config, "pad_token_id": 0}))
    weights = load_file(base / "model.safetensors")
    weights["score.weight"] = torch.randn(1, config["hidden_size"]) * 0.3
    weights.pop("lm_head.weight")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    case = CASES["classes"]
    save_adapter(case, base, tmp_path / "a", 0)
    flags = ("--model-path", str(base), "--served-model-name", "base", "--threads", "1")
    flags += ("--cpu-activations", "fp32", "--lora-paths", f"a={tmp_path / 'a'}")
    documents = ["four", "a banyan tree", "hello"]
    with serving(tmp_path / "server.log", *flags) as server:

        def posted(path: str, model: str, **fields: object):
            answer = server.http.post(path, json={"model": model, **fields})
            assert answer.status_code == 200, answer.text
            return answer.json()

        tokens = posted("/encode", "a", text=[["one two", d] for d in documents])
        ids = [
            posted("/tokenize", "base", prompt="one two")["tokens"]
            + posted("/tokenize", "base", prompt=d)["tokens"]
            for d in documents
        ]
        assert [t["meta_info"]["prompt_tokens"] for t in tokens] == [len(one) for one in ids]
        for model in ("base", "a"):
            kind = transformers.AutoModelForSequenceClassification
            reference_model = kind.from_pretrained(base).eval()
            if model == "a":
                peft = pytest.importorskip("peft")
                reference_model = peft.PeftModel.from_pretrained(reference_model, tmp_path / "a")
            with torch.no_grad():
                logits = [reference_model(torch.tensor([one])).logits.item() for one in ids]
            scores = posted("/v1/score", model, query="one two", items=documents)
            assert np.allclose(np.ravel(scores["scores"]), logits, rtol=0, atol=1e-4)
            ranked = posted("/v1/rerank", model, query="one two", documents=documents)
            assert [entry["index"] for entry in ranked] == np.argsort(-np.array(logits)).tolist()
            shown = sorted(ranked, key=lambda entry: entry["index"])
            expected = 1 / (1 + np.exp(-np.array(logits)))
            assert np.allclose([entry["score"] for entry in shown], expected, rtol=0, atol=1e-4)
        several = {"query": "one two", "items": documents, "lora_path": ["a", None, "a"]}
        assert len(posted("/v1/score", "base", **several)["scores"]) == 3
        asked = {"model": "base:x", "query": "a", "documents": ["b"]}
        wrong = server.http.post("/v1/rerank", json=asked)
        assert wrong.status_code == 404 and "There are: a." in wrong.text
        assert posted("/v1/classify", "a", input="hello")["model"] == "a"
