"""Models of the transformers library with our attention equal the library's own."""

import json

import pytest
import torch
import transformers

from banyan import Engine
from banyan.base.errors import ConfigError, ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.transformers_model import load_transformers_model
from banyan.parallel.groups import Group, Groups
from tests.models.families import SIZES, VARIANTS, rewrite_config, tiny
from tests.support.logits import PROMPT, expected_logits

CPU = torch.device("cpu")
OTHERS = {
    "stablelm": ("StableLm", {"use_parallel_residual": True, "partial_rotary_factor": 0.25}),
    "gpt neox": ("GPTNeoX", {"num_key_value_heads": None}),
    "olmo": ("Olmo", {}),
    "mixture of experts": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Families of other shapes."""


def load(folder, ops, **more):
    model_config = read_model_config(str(folder), is_foreign=True)
    return load_transformers_model(model_config, Build(ops), **more)


@pytest.mark.parametrize("variant", [*OTHERS, "mistral, window", "gemma2", "cohere2", "granite"])
@torch.inference_mode()
def test_logits_equal_those_of_transformers(variant, ops, paged, tmp_path, monkeypatch):
    if variant in OTHERS:
        monkeypatch.setitem(VARIANTS, variant, OTHERS[variant])
    reference = tiny(variant, tmp_path)

    pages = paged(load(tmp_path, ops), num_requests=2)
    first = pages.step([(0, PROMPT[:30]), (1, PROMPT[5:40])])
    second = pages.step([(1, PROMPT[40:]), (0, PROMPT[30:])])

    logits = torch.cat([first[0], second[1]])
    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)
    other = torch.cat([first[1], second[0]])
    wanted = expected_logits(reference, PROMPT[5:])
    torch.testing.assert_close(other, wanted, atol=1e-4, rtol=0)


def saved(name, folder, **changes):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_model_whose_attention_is_its_own_is_refused(ops, tmp_path):
    folder = saved("Bloom", tmp_path)
    rewrite_config(folder, num_hidden_layers=4, num_attention_heads=6, max_position_embeddings=64)

    with pytest.raises(ModelError, match="BloomForCausalLM"):
        load(folder, ops)


def test_frequencies_that_depend_on_the_batch_are_refused(ops, tmp_path):
    tiny("phi3, longrope on part of a head", tmp_path)

    with pytest.raises(ModelError, match="longrope.*longest sequence"):
        load(tmp_path, ops)


def test_weights_that_are_missing_are_named(ops, tmp_path):
    from safetensors.torch import load_file, save_file

    tiny("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj"):
        load(tmp_path, ops)


def test_code_of_the_repository_is_never_run(tmp_path):
    tiny("qwen2", tmp_path)
    rewrite_config(tmp_path, auto_map={"AutoModelForCausalLM": "mine.Model"})

    with pytest.raises(ModelError, match="never run"):
        read_model_config(str(tmp_path), is_foreign=True)


def test_what_the_library_cannot_do_here_is_refused(ops, tmp_path):
    tiny("qwen2", tmp_path)
    model_config = read_model_config(str(tmp_path), is_foreign=True)

    with pytest.raises(ConfigError, match="--tp 1"):
        load_transformers_model(model_config, Build(ops, Groups.of(Group(0, 2, object()))))
    with pytest.raises(ConfigError, match="cannot load the format dummy"):
        load(tmp_path, ops, load_format="dummy")
    with pytest.raises(ConfigError, match="needs a folder"):
        read_model_config(str(tmp_path / "model.gguf"), is_foreign=True)


@pytest.mark.parametrize("variant", ["mixture of experts", "gemma2", "olmo"])
def test_the_engine_serves_a_model_of_the_library(variant, tmp_path, monkeypatch):
    if variant in OTHERS:
        monkeypatch.setitem(VARIANTS, variant, OTHERS[variant])
    reference = tiny(variant, tmp_path)
    engine = Engine(
        model_path=str(tmp_path),
        model_impl="transformers",
        skip_tokenizer_init=True,
        engine_mode="inprocess",
        threads=1,
    )
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}

    answers = engine.generate(input_ids=[PROMPT, PROMPT[:20]], sampling_params=greedy)
    engine.shutdown()

    for prompt, answer in zip((PROMPT, PROMPT[:20]), answers, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert answer["output_ids"] == expected[0, len(prompt) :].tolist()


def test_an_architecture_without_a_spec_is_refused_unless_the_library_is_asked(tmp_path):
    tiny("qwen2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["JetMoeForCausalLM"], "model_type": "jetmoe"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="JetMoeForCausalLM.*--model-impl transformers"):
        read_model_config(str(tmp_path))
