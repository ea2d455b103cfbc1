"""Heads of classes on encoders and decoders, and what a folder says about its vectors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.messages.plan import POOL, Join, PageGrant, Row, StepPlan
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import CLS, FULL, LAST, MEAN, Pooling
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig

CPU = torch.device("cpu")
SEP = 9
PROMPTS = ([5, 17, 23, SEP], [5, 30, SEP, 11, 12, 13, SEP], [5, SEP])
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "initializer_range": 0.3,
}


def vectors(folder: Path, prompts=PROMPTS) -> np.ndarray:
    """Every prompt in one step."""
    model_config = read_model_config(str(folder))
    ops = bind("cpu", CPU, torch.float32, frozenset(), model_config.head_dim)
    build = Build(ops)
    sizes = RunnerConfig(4, 32, (GroupLayout(FULL, 0, 32, 8),))
    runner = ModelRunner(load_model(model_config, build), build, sizes)
    joins, grants, rows = [], [], []
    for slot, prompt in enumerate(prompts, 1):
        tokens = np.asarray(prompt, np.int32).tobytes()
        joins.append(Join(slot, tokens, len(prompt), SamplingParams(max_new_tokens=0)))
        grants.append(PageGrant(slot, 0, 0, [slot]))
        rows.append(Row(slot, 0, len(prompt), want=POOL))
    result = runner.launch(StepPlan(1, joins=joins, grants=grants, rows=rows)).result()
    assert not result.error and not result.failed, result
    return np.stack([np.frombuffer(v, np.float32) for v in result.vectors])


def saved(model, folder: Path) -> Path:
    model.eval().save_pretrained(folder)
    entry = {"content": "[SEP]", "id": SEP}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [entry]}))
    return folder


def scores(model, prompts=PROMPTS, **inputs) -> np.ndarray:
    with torch.no_grad():
        found = [
            model(
                torch.tensor([p]), **{name: torch.tensor([of(p)]) for name, of in inputs.items()}
            ).logits[0]
            for p in prompts
        ]
    return torch.stack(found).numpy()


def second_half(prompt: list[int]) -> list[int]:
    """token_type_ids of a pair: 1 behind the first separator."""
    first = prompt.index(SEP)
    return [int(i > first) for i in range(len(prompt))]


def test_a_bert_classifier_scores_pairs_as_transformers_does(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3))
    expected = scores(model.eval(), token_type_ids=second_half)
    found = vectors(saved(model, tmp_path))
    assert np.allclose(found, expected, atol=1e-5)
    assert read_model_config(str(tmp_path)).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta"])
def test_roberta_counts_positions_from_behind_the_padding_id(tmp_path, family):
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        **SIZES, num_labels=1, type_vocab_size=1, pad_token_id=1
    )
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    expected = scores(model.eval())
    assert np.allclose(vectors(saved(model, tmp_path)), expected, atol=1e-5)
    assert read_model_config(str(tmp_path)).context_length == 38


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_causal_classifier_reads_the_last_token(tmp_path, family):
    import transformers

    torch.manual_seed(3)
    extra = {"head_dim": 8} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(
        **SIZES, num_key_value_heads=2, num_labels=2, pad_token_id=0, **extra
    )
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    expected = scores(model.eval())
    assert np.allclose(vectors(saved(model, tmp_path)), expected, atol=1e-5)


def encoder(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    return saved(BertModel(BertConfig(**SIZES)), folder)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("pooling_mode_cls_token", CLS),
        ("pooling_mode_mean_tokens", MEAN),
        ("pooling_mode_lasttoken", LAST),
    ],
)
def test_the_modules_of_a_folder_choose_the_pooling(tmp_path, mode, kind):
    folder = encoder(tmp_path)
    assert read_model_config(str(folder)).pooling == Pooling(CLS)
    write_modules(folder, {mode: True, "word_embedding_dimension": 32})
    assert read_model_config(str(folder)).pooling == Pooling(kind, normalize=False)


@pytest.mark.parametrize(
    ("pooling", "module", "text"),
    [
        ({"pooling_mode_max_tokens": True}, "Normalize", "pools by pooling_mode_max_tokens"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "Normalize",
            "pools by",
        ),
        ({"pooling_mode_mean_tokens": True}, "Dense", "asks for the module"),
    ],
)
def test_poolings_and_modules_that_are_not_known_are_named(tmp_path, pooling, module, text):
    folder = encoder(tmp_path)
    write_modules(folder, pooling, module)
    with pytest.raises(ModelError, match=text):
        read_model_config(str(folder))


def write_modules(folder: Path, pooling: dict[str, object], module: str = "") -> None:
    kinds = ["Transformer", "Pooling", *([module] if module else [])]
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_body_without_a_head_gives_its_last_state(tmp_path, family):
    import transformers

    torch.manual_seed(3)
    extra = {"head_dim": 8} if family == "Qwen3" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, num_key_value_heads=2, **extra)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        states = [model(torch.tensor([p])).last_hidden_state[0, -1] for p in PROMPTS]
    expected = torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy()
    assert np.allclose(vectors(saved(model, tmp_path)), expected, atol=1e-5)
