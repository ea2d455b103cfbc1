"""Adapters of every family against PEFT, from its saved adapter to logits over pages."""

import json

import numpy as np
import pytest
import torch

from banyan.base.errors import ConfigError, ModelError
from banyan.config.schema import LoraConfig
from banyan.layers.build import Build
from banyan.lora.adapter_config import KINDS
from banyan.lora.load import base_of, enable_lora, load_adapter
from banyan.lora.pool import open_lora_targets
from banyan.lora.rules import MOST_LOADED
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.platform.cpu import CpuPlatform
from tests.models.families import tiny
from tests.support.flags import config_of
from tests.support.lora import as_gguf, write_adapter
from tests.support.peft import PROMPT, edited, enter, opened, random_peft, show
from tests.system.checkpoint import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("fit") / "model")


CPU = torch.device("cpu")
ALL = "all-linear"
TARGETS = {
    "qwen3, bias": ["q_proj", "v_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "glm4": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    "starcoder2": ["q_proj", "c_fc", "c_proj"],
    "cohere2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "granite, all factors": ["q_proj", "k_proj", "o_proj", "up_proj"],
    "gemma2": ["k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
    "qwen2 moe": ["q_proj", "o_proj"],
    "deepseek v2": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
    "deepseek v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "qwen3 next": ["q_proj", "v_proj", "o_proj", "out_proj"],
}


@pytest.mark.parametrize("variant", TARGETS)
def test_an_adapter_gives_the_logits_of_peft(variant, ops, paged, tmp_path):
    reference = tiny(variant, tmp_path / "base")
    adapted = random_peft(
        reference,
        tmp_path / "adapter",
        target_modules=TARGETS[variant],
        r=5,
        lora_alpha=9,
        use_rslora=True,
        rank_pattern={TARGETS[variant][0]: 3},
        alpha_pattern={f"layers.1.self_attn.{TARGETS[variant][0]}": 20},
    )
    with torch.no_grad():
        expected = adapted(torch.tensor([PROMPT])).logits[0]
        with adapted.disable_adapter():
            plain = adapted(torch.tensor([PROMPT])).logits[0]
    assert (expected - plain).abs().max() > 0.05
    model, base = opened(tmp_path / "base", ops)
    enter(base, 2, load_adapter(str(tmp_path / "adapter"), base))
    pages = paged(model, num_requests=2)
    show(base, [2] * len(PROMPT) + [0] * len(PROMPT))
    with_it, without = pages.step([(0, PROMPT), (1, PROMPT)])
    torch.testing.assert_close(with_it, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(without, plain, atol=2e-4, rtol=0)


OF_BOTH = {"embed_tokens": [3, 96, 7], "lm_head": [5, 40]}
KINDS_OF = {
    "kv_b": {"target_modules": ["kv_b_proj", "o_proj", "q_b_proj"], "use_rslora": True},
    "lm_head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "DoRA": {"target_modules": ["q_proj", "k_proj", "o_proj", "up_proj"], "use_dora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [90, 3, 7]},
    "tokens of both": {"target_modules": ["v_proj"], "trainable_token_indices": OF_BOTH},
}


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *((kind, "qwen2") for kind in KINDS_OF if kind != "kv_b"),
        ("kv_b", "deepseek v3"),
        *((kind, "qwen2, tied") for kind in ("lm_head", "saved", "tokens")),
        ("tokens", "gemma3, tied"),
        ("both", "gemma3, tied"),
        ("both", "gemma3, untied"),
        ("saved", "gemma3, untied"),
        ("DoRA", "qwen3, bias"),
        ("DoRA", "deepseek v3"),
    ],
)
def test_adapters_of_other_kinds_give_the_logits_of_peft(kind, variant, ops, paged, tmp_path):
    name, _, ends = variant.partition(", ")
    is_tied = {"tie_word_embeddings": ends == "tied"} if ends in ("tied", "untied") else {}
    reference = tiny(name if is_tied else variant, tmp_path / "base", **is_tied)
    facts = KINDS_OF[kind]
    if variant == "deepseek v3" and kind == "DoRA":
        facts = {**facts, "target_modules": ["q_a_proj", "q_b_proj", "o_proj"]}
    adapted = random_peft(reference, tmp_path / "a", r=5, lora_alpha=9, **facts)
    with torch.no_grad():
        expected = adapted(torch.tensor([PROMPT])).logits[0]
        with adapted.disable_adapter():
            plain = adapted(torch.tensor([PROMPT])).logits[0]
    assert (expected - plain).abs().max() > 0.05
    model, base = opened(tmp_path / "base", ops, kinds=KINDS)
    loaded = load_adapter(str(tmp_path / "a"), base)
    assert loaded.rows or kind == "kv_b"
    enter(base, 2, loaded)
    pages = paged(model, num_requests=2)
    show(base, [2] * len(PROMPT) + [0] * len(PROMPT))
    with_it, without = pages.step([(0, PROMPT), (1, PROMPT)])
    torch.testing.assert_close(with_it, expected, atol=5e-4, rtol=0)
    torch.testing.assert_close(without, plain, atol=2e-4, rtol=0)


@pytest.mark.parametrize("rank", [1, 64, 256])
def test_ranks_from_one_to_wider_than_the_model_are_served(rank, ops, paged, tmp_path):
    reference = tiny("qwen2", tmp_path / "base")
    adapted = random_peft(reference, tmp_path / "a", target_modules=["q_proj", "down_proj"], r=rank)
    with torch.no_grad():
        expected = adapted(torch.tensor([PROMPT])).logits[0]
    model, base = opened(tmp_path / "base", ops, max_rank=256)
    enter(base, 1, load_adapter(str(tmp_path / "a"), base))
    show(base, [1] * len(PROMPT))
    (found,) = paged(model).step([(0, PROMPT)])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("down_proj",)])
def test_an_adapter_of_projections_that_are_not_open_is_refused(targets, ops, model, tmp_path):
    lora = config_of("--model-path", "tiny", "--lora-target-modules", *targets).lora
    lora = LoraConfig(True, max_rank=8, targets=lora.targets, max_loaded=MOST_LOADED)
    lora_targets = open_lora_targets(lora, CpuPlatform().traits)
    assert lora_targets is not None
    opened_model = load_model(read_model_config(str(model)), Build(ops, adapters=lora_targets))
    enable_lora(opened_model, lora_targets, ops)
    base = base_of(opened_model, lora_targets)
    fitting = load_adapter(str(write_adapter(tmp_path / "a", 1, targets=targets)), base)
    assert fitting.rank == 8
    with pytest.raises(ConfigError, match="o_proj, which --lora-target-modules leaves out"):
        load_adapter(str(write_adapter(tmp_path / "b", 1, targets=("o_proj",))), base)


def test_a_gguf_adapter_is_the_one_that_it_was_made_of(ops, model, tmp_path):
    """Rows of q and k lie in pairs there."""
    _, base = opened(model, ops)
    peft = write_adapter(tmp_path / "a", 1, 4, lora_alpha=12)
    loaded = load_adapter(str(peft), base)
    found = load_adapter(str(as_gguf(peft, tmp_path / "a.gguf")), base)
    assert found.parts.keys() == loaded.parts.keys() and found.rank == 4
    assert found.digest != loaded.digest
    for name, parts in loaded.parts.items():
        for mine, its in zip(sorted_parts(found.parts[name]), sorted_parts(parts), strict=True):
            assert mine.first == its.first and mine.scale == its.scale == 3
            assert torch.equal(mine.down, its.down) and torch.equal(mine.up, its.up)


def sorted_parts(parts):
    return sorted(parts, key=lambda part: part.first)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"adapter.type": "control"}, "its adapter.type control"),
        ({"general.type": "model"}, "is no adapter: its general.type is model"),
        ({"adapter.lora.alpha": "8"}, "lacks a number adapter.lora.alpha"),
        ({"blk.0.attn_q.weight.lora_a": None}, "lacks lora_a of blk.0.attn_q"),
        ({"blk.0.attn_q.weight.lora_a": np.ones((4, 7), np.float32)}, "another base: blk.0.attn_q"),
        ({"blk.0.attn_q.weight.lora_a": np.ones((3, 64), np.float32)}, "no pair of one rank"),
        ({"blk.0.attn_q.weight": np.ones((4, 64), np.float32)}, "is no matrix of LoRA"),
        ({"blk.9.attn_q.weight.lora_a": np.ones((4, 64), np.float32)}, "lacks lora_b of blk.9"),
    ],
)
def test_a_gguf_file_that_cannot_be_served_says_why(change, text, ops, model, tmp_path):
    _, base = opened(model, ops)
    path = as_gguf(write_adapter(tmp_path / "a", 1, 4), tmp_path / "a.gguf", change)
    with pytest.raises(ConfigError, match=text):
        load_adapter(str(path), base)


def peft_of(reference, folder, **config):
    random_peft(reference, folder, r=4, **config)
    return folder


def stretched(tensors):
    for name in [name for name in tensors if "lm_head" in name]:
        tensors[name] = np.concatenate([tensors[name], tensors[name][:3]])


def shrunk(tensors):
    for name in [name for name in tensors if "lm_head" in name]:
        tensors[name] = tensors[name][:-3].copy()


def without_gains(tensors):
    del tensors[min(name for name in tensors if "magnitude" in name)]


def fewer_rows(tensors):
    (name,) = [name for name in tensors if "trainable_tokens" in name]
    tensors[name] = tensors[name][:2]


def without_rows(tensors):
    del tensors[next(name for name in tensors if "trainable_tokens" in name)]


TOKENS = {"target_modules": ["q_proj"], "trainable_token_indices": [90, 3, 7]}
BOTH = {"target_modules": ["embed_tokens", "lm_head"]}
TIED = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(
    ("more", "config", "change", "text"),
    [
        ({}, SAVED, stretched, "lm_head: it adds 3 tokens to the 97 of the base"),
        ({"tie_word_embeddings": True}, TIED, None, "counts for the other too"),
        ({}, {**BOTH, "use_dora": True}, None, "DoRA of it are not served"),
        ({}, {**SAVED, "modules_to_save": ["norm"]}, None, "only embed_tokens and lm_head may be"),
        ({}, {"target_modules": ["q_proj"], "use_dora": True}, without_gains, "have no magnitude"),
        ({}, SAVED, shrunk, "lm_head: it has 94 tokens and the base 97"),
        ({}, TOKENS, fewer_rows, r"has rows of tokens of \[2, 48\], and .* names 3 tokens of it"),
        ({}, TOKENS, without_rows, "lacks the rows of the tokens .* of embed_tokens"),
    ],
)
def test_other_kinds_that_cannot_be_served_say_why(more, config, change, text, ops, tmp_path):
    reference = tiny("qwen2", tmp_path / "base", **more)
    folder = peft_of(reference, tmp_path / "a", **config)
    if change is not None:
        edited(folder, change)
    _, base = opened(tmp_path / "base", ops, kinds=KINDS)
    with pytest.raises(ConfigError, match=text):
        load_adapter(str(folder), base)


def test_rows_of_tokens_that_the_base_lacks_are_refused(ops, tmp_path):
    folder = peft_of(tiny("qwen2", tmp_path / "base"), tmp_path / "a", **TOKENS)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["trainable_token_indices"] = [90, 3, 97]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    _, base = opened(tmp_path / "base", ops, kinds=KINDS)
    with pytest.raises(ConfigError, match="embed_tokens: it adds 1 tokens to the 97 of the base"):
        load_adapter(str(folder), base)


WORDS = {
    "added_tokens.json": lambda token: {"<new>": token},
    "tokenizer_config.json": lambda token: {"added_tokens_decoder": {str(token): {}}},
    "tokenizer.json": lambda token: {"model": {"vocab": {}}, "added_tokens": [{"id": token}]},
}


@pytest.mark.parametrize("file", WORDS)
def test_a_tokenizer_with_tokens_that_the_base_lacks_is_refused(file, ops, tmp_path):
    """Unless the base's own has them too."""
    reference = tiny("qwen2", tmp_path / "base")
    folder = peft_of(reference, tmp_path / "a", target_modules=["q_proj"])
    _, base = opened(tmp_path / "base", ops)

    def bring(to, token):
        (to / file).write_text(json.dumps(WORDS[file](token)))

    bring(folder, 96)
    assert load_adapter(str(folder), base).parts
    bring(folder, 98)
    with pytest.raises(ConfigError, match="a tokenizer of its own: it adds 2 tokens to the 97"):
        load_adapter(str(folder), base)
    bring(tmp_path / "base", 97)
    with pytest.raises(ConfigError, match="a tokenizer of its own"):
        load_adapter(str(folder), base)
    bring(tmp_path / "base", 98)
    assert load_adapter(str(folder), base).parts
    (folder / file).write_text('{"added_tokens": [')
    with pytest.raises((ConfigError, ModelError), match=f"{file}.*(is not JSON|truncated)"):
        load_adapter(str(folder), base)


@pytest.mark.parametrize(("is_rounded", "types"), [(False, {0}), (True, {3, 4})])
def test_matrices_lie_in_8_bits_next_to_rounded_weights_alone(
    is_rounded, types, ops, model, tmp_path
):
    lora = LoraConfig(True, max_rank=8, max_loaded=4)
    lora_targets = open_lora_targets(lora, CpuPlatform().traits, is_rounded)
    assert lora_targets is not None
    opened_model = load_model(read_model_config(str(model)), Build(ops, adapters=lora_targets))
    enable_lora(opened_model, lora_targets, ops)
    base = base_of(opened_model, lora_targets)
    enter(base, 1, load_adapter(str(write_adapter(tmp_path / "a", 1)), base))
    assert {int(table.entries[1, 4]) for table in lora_targets.tables.values()} == types


def renamed(old, new):
    def change(tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def widened(tensors):
    for name in [name for name in tensors if "q_proj.lora_A" in name]:
        tensors[name] = np.zeros((8, 128), np.float32)


def without_a_layer(tensors):
    for name in [name for name in tensors if "layers.1.self_attn.q_proj" in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (widened, "another base.*128 inputs and 64 outputs there, 64 and 64 here.*made for tiny"),
        (renamed("layers.1.", "layers.7."), "layers.7.self_attn.q_proj: the model has no such"),
        (renamed("q_proj", "query"), "self_attn.query: the model has no such projection"),
        (
            renamed("model.layers.0.self_attn.q_proj", "lm_head"),
            "started without memory for that.*modules all lm_head",
        ),
        (without_a_layer, "lacks the matrices of 1 projections.*model.layers.1.self_attn.q_proj"),
    ],
)
def test_an_adapter_of_another_base_is_refused_by_name(change, text, ops, model, tmp_path):
    _, base = opened(model, ops)
    folder = write_adapter(tmp_path / "a", 1, targets=("q_proj",))
    edited(folder, change)
    with pytest.raises(ConfigError, match=text):
        load_adapter(str(folder), base)


@pytest.mark.parametrize(
    ("variant", "module", "text"),
    [
        ("qwen3 moe", "mlp.experts.0.gate_proj", "experts., and the server was started without"),
        ("qwen3 moe", "mlp.experts", "1 stacked parameters, and target_parameters names 0"),
        ("qwen3 moe", "mlp.gate", "router., and the server was started without"),
        ("deepseek v3", "self_attn.kv_b_proj", "kv_b_proj., and the server was started without"),
    ],
)
def test_projections_that_take_none_are_named(variant, module, text, ops, model, tmp_path):
    tiny(variant, tmp_path / "base")
    _, base = opened(tmp_path / "base", ops)
    folder = write_adapter(tmp_path / "a", 1, targets=("q_proj",))
    edited(folder, renamed("self_attn.q_proj", module))
    with pytest.raises(ConfigError, match=text):
        load_adapter(str(folder), base)


def test_the_digest_tells_other_weights_and_other_scales(ops, model, tmp_path):
    _, base = opened(model, ops)
    seeds = {"a": 1, "b": 1, "c": 2}
    first, same, other = (write_adapter(tmp_path / name, seed) for name, seed in seeds.items())
    digests = [load_adapter(str(folder), base).digest for folder in (first, same, other)]
    assert digests[0] == digests[1] != digests[2]
    config = json.loads((same / "adapter_config.json").read_text())
    (same / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    assert load_adapter(str(same), base).digest != digests[0]
