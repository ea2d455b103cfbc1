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
        ({"pooling_mode_mean_tokens": True}, "LSTM", "asks for the module"),
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


LONG = ([5, 17, 23, 11, 12, 13, 9, 30, 31, 32, 7, 6], [5, 30, 9], [5])


@pytest.mark.parametrize("bias", [False, True])
def test_a_body_that_looks_both_ways_is_pooled_and_projected(tmp_path, bias):
    """EmbeddingGemma: windows to both sides, the mean, and two projections."""
    from safetensors.torch import save_file
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(3)
    sizes = {**SIZES, "num_hidden_layers": 3}
    config = Gemma3TextConfig(
        **sizes,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
        query_pre_attn_scalar=8,
    )
    model = Gemma3TextModel(config).eval()
    folder = saved(model, tmp_path)
    write_modules(folder, {"pooling_mode_mean_tokens": True}, "Normalize")
    listed = json.loads((folder / "modules.json").read_text())
    dense, end = [], listed.pop()
    for index, (inputs, outputs) in enumerate(((32, 48), (48, 20))):
        layer = torch.nn.Linear(inputs, outputs, bias=bias)
        dense += [layer, torch.nn.Tanh()] if bias else [layer]
        place = f"{index + 2}_Dense"
        (folder / place).mkdir()
        save_file(
            {f"linear.{name}": value.detach() for name, value in layer.named_parameters()},
            folder / place / "model.safetensors",
        )
        kind = "activation.Tanh" if bias else "linear.Identity"
        facts = {"in_features": inputs, "out_features": outputs, "bias": bias}
        facts["activation_function"] = f"torch.nn.modules.{kind}"
        (folder / place / "config.json").write_text(json.dumps(facts))
        listed.append({"type": "sentence_transformers.models.Dense", "path": place})
    (folder / "modules.json").write_text(json.dumps([*listed, end]))
    with torch.no_grad():
        means = [model(torch.tensor([p])).last_hidden_state[0].mean(0) for p in LONG]
        projected = torch.nn.Sequential(*dense)(torch.stack(means))
    expected = torch.nn.functional.normalize(projected, dim=-1).numpy()
    assert np.allclose(vectors(folder, LONG), expected, atol=1e-5)
    alone = np.concatenate([vectors(folder, [p]) for p in LONG])
    assert np.allclose(alone, expected, atol=1e-5)


@pytest.mark.parametrize("is_old", [False, True])
def test_modern_bert_sees_half_a_window_to_both_sides(tmp_path, is_old):
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(3)
    ids = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    sizes = {**SIZES, "num_hidden_layers": 4, "initializer_cutoff_factor": 3.0}
    model = ModernBertModel(ModernBertConfig(**sizes, **ids, local_attention=4)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
        states = [model(torch.tensor([p])).last_hidden_state[0, 0] for p in LONG]
    folder = saved(model, tmp_path)
    if is_old:
        config = json.loads((folder / "config.json").read_text())
        for name in ("layer_types", "rope_parameters"):
            del config[name]
        config |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0}
        config |= {"local_rope_theta": 10000.0, "position_embedding_type": "absolute"}
        (folder / "config.json").write_text(json.dumps(config))
    expected = torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy()
    assert np.allclose(vectors(folder, LONG), expected, atol=1e-5)


def test_a_projection_that_its_file_does_not_hold_is_named(tmp_path):
    from safetensors.torch import save_file

    folder = encoder(tmp_path)
    write_modules(folder, {"pooling_mode_mean_tokens": True}, "Dense")
    facts = {"in_features": 32, "out_features": 8, "bias": True}
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps(facts))
    save_file({"linear.weight": torch.zeros(8, 32)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelError, match="no float tensor linear.bias of shape"):
        vectors(folder)
    unknown = {**facts, "activation_function": "torch.nn.modules.activation.GELU"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(ModelError, match="activation_function"):
        read_model_config(str(folder))
