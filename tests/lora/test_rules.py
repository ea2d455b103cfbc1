"""What the flags of adapters come to, and what an adapter's folder may not hold."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.resolve import resolve
from banyan.lora.adapter_files import AdapterPlace, named_adapters, read_adapter
from banyan.model_config.model_config import ExpertFacts
from tests.support.configs import MODEL_CONFIG
from tests.support.lora import write_adapter


def lora_of(*words: str):
    config = parse(["--model-path", "tiny", *words], Environment())
    return resolve(config, MODEL_CONFIG, Environment()).lora


def test_adapters_are_named_in_three_ways(tmp_path: Path) -> None:
    path = str(tmp_path)
    words = (f"one={path}", path, json.dumps({"lora_name": "x", "lora_path": path, "pinned": True}))
    assert named_adapters(words) == (
        AdapterPlace("one", path),
        AdapterPlace(path, path),
        AdapterPlace("x", path, True),
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a=b", "a=c"], "two adapters 'a'"),
        (["a="], "names no folder"),
        (["a b=/x"], "cannot name an adapter"),
        (["../x=/x"], "cannot name an adapter"),
        (['{"lora_name": "a"}'], "must have lora_name, lora_path"),
        (['{"lora_name": "a", "lora_path": "b", "more": 1}'], "must have lora_name, lora_path"),
        (['{"lora_name": "a", "lora_path": 3}'], "lora_path must be a str"),
        (['{"lora_name"'], "is not JSON"),
        (['{"lora_name": "a", "lora_name": "b", "lora_path": "c"}'], "appears twice"),
    ],
)
def test_a_word_that_names_no_adapter_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        named_adapters(tuple(words))


def test_paths_switch_adapters_on_and_tell_the_rank(tmp_path: Path) -> None:
    small, large = (write_adapter(tmp_path / f"r{rank}", 1, rank) for rank in (4, 16))
    lora = lora_of("--lora-paths", f"a={small}", f"b={large}")
    assert lora.is_enabled and lora.max_rank == 16 and lora.max_loaded == 0
    assert not lora_of().is_enabled


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--enable-lora", "the maximum rank is unknown"),
        ("--lora-paths a={}/r8 --max-lora-rank 4", "has rank 8, --max-lora-rank is 4"),
        ("--lora-paths a={}/nowhere", "it is not a folder"),
        ("--enable-lora --max-lora-rank 5000", "the maximum is 4096"),
        ("--lora-paths a={0}/r8 b={0}/r8 --max-loaded-loras 1 --max-loras-per-batch 1", "2 adap"),
        ("--enable-lora --max-lora-rank 8 --max-loaded-loras 2", "less than --max-loras-per-batch"),
        ("--enable-lora --max-lora-rank 8 --model-impl transformers", "cannot be combined"),
        (
            "--enable-lora --max-lora-rank 8 --enable-dp-attention --dp 2 --tp 2",
            "only have the adapters of the start",
        ),
        (
            "--lora-paths a={}/r8 --lora-target-modules all lm_head --enable-dp-attention --dp 2 "
            "--tp 2",
            "lm_head cannot be combined with --enable-dp-attention .* Add --enable-dp-lm-head",
        ),
        ("--enable-lora --max-lora-rank 8 --lora-target-modules w1", "'w1' is not a LoRA target"),
        (
            "--enable-lora --max-lora-rank 8 --lora-target-modules all experts",
            "and the model has no experts",
        ),
        ("--lora-eviction-policy random", "must be one of"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(words: str, text: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "r8", 1, rank=8)
    with pytest.raises(ConfigError, match=text):
        lora_of(*words.format(tmp_path).split())


def test_adapters_of_experts_are_refused_where_experts_move() -> None:
    model_config = replace(MODEL_CONFIG, experts=ExpertFacts(4, 2, 32))
    words = "--tp 2 --ep 2 --max-lora-rank 8 --enable-lora --lora-target-modules all"
    moving = ["--ep-num-redundant-experts", "2"]

    def lora(*more: str):
        config = parse(["--model-path", "tiny", *words.split(), *more], Environment())
        return resolve(config, model_config, Environment()).lora

    assert lora("experts", "router").kinds == ("experts", "router")
    assert lora(*moving).kinds == ()
    for kind in ("experts", "router"):
        with pytest.raises(ConfigError, match="need every expert once"):
            lora(kind, *moving)


@pytest.mark.parametrize(
    "words", [("--custom-weight-loader", "math:floor"), ("--load-format", "dummy")]
)
def test_dora_is_refused_next_to_weights_that_are_not_the_checkpoints(
    words, tmp_path: Path
) -> None:
    plain, gains = (write_adapter(tmp_path / name, 1, targets=["o_proj"]) for name in ("p", "g"))
    file = gains / "adapter_model.safetensors"
    tensors = load_file(file)
    stems = [name.removesuffix("A.weight") for name in tensors if name.endswith("A.weight")]
    lengths = {f"{s}magnitude_vector": tensors[f"{s}B.weight"][:, 0].copy() for s in stems}
    save_file(tensors | lengths, file)
    facts = json.loads((gains / "adapter_config.json").read_text()) | {"use_dora": True}
    (gains / "adapter_config.json").write_text(json.dumps(facts))
    assert lora_of("--lora-paths", f"p={plain}", *words).kinds == ()
    assert lora_of("--lora-paths", f"g={gains}").kinds == ("DoRA",)
    with pytest.raises(ConfigError, match=f"DoRA adapters cannot be combined with {words[0]} "):
        lora_of("--lora-paths", f"g={gains}", *words)


def broken(folder: Path, what: str) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = folder / "adapter_model.safetensors"
    match what:
        case "pickle":
            weights.rename(folder / "adapter_model.bin")
        case "no weights":
            weights.unlink()
        case "a model":
            (folder / "adapter_config.json").rename(folder / "config.json")
        case "no config":
            (folder / "adapter_config.json").unlink()
        case "not json":
            (folder / "adapter_config.json").write_text("{")
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "empty":
            save_file({}, weights)
        case "half":
            save_file({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": ONES}, weights)
        case "int8":
            stem = "base_model.model.model.layers.0.mlp.up_proj.lora_"
            whole = {f"{stem}{part}.weight": np.ones((8, 8), np.int8) for part in "AB"}
            save_file(whole, weights)
        case "magnitude":
            save_file({"base_model.model.model.layers.0.lora_magnitude_vector": ONES}, weights)
        case "stranger":
            save_file({"base_model.model.model.layers.0.prompt_embeddings": ONES}, weights)
        case "many magnitudes":
            stem = "base_model.model.model.layers.0.mlp.up_proj.lora_"
            up = np.ones((128, 8), np.float32)
            whole = {f"{stem}A.weight": ONES, f"{stem}B.weight": up}
            save_file({**whole, f"{stem}magnitude_vector": ONES}, weights)
            (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
        case "link":
            weights.rename(folder / "elsewhere")
            weights.symlink_to(folder / "nowhere")
        case "huge header":
            weights.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
        case "header":
            weights.write_bytes((2).to_bytes(8, "little") + b"[]")
        case "embedding":
            save_file({"base_model.model.model.embed_tokens.lora_embedding_A": ONES}, weights)
        case _:
            changes = json.loads(what)
            (folder / "adapter_config.json").write_text(json.dumps(config | changes))


def test_a_file_of_another_kind_is_no_adapter(tmp_path: Path) -> None:
    file = tmp_path / "adapter.bin"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="a file of another kind"):
        read_adapter(str(file))
    (tmp_path / "adapter.gguf").write_bytes(b"x")
    with pytest.raises(ConfigError, match="it does not start with GGUF"):
        read_adapter(str(tmp_path / "adapter.gguf"))


ONES = np.ones((8, 8), np.float32)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("pickle", "never opened.*save_file.*torch.load"),
        ("no weights", "lacks adapter_model.safetensors"),
        ("no config", "lacks adapter_config.json"),
        ("a model", "whole model, no adapter"),
        ("not json", "is not JSON"),
        ("cut", "cut short"),
        ("empty", "has no tensors"),
        ("half", "lacks lora_B of model.layers.0.mlp.up_proj"),
        ("int8", "is I8; F32, F16, BF16 are read"),
        ("magnitude", "use_dora is false, and 1 projections have a magnitude"),
        ("stranger", "1 tensors are no matrices of LoRA"),
        ("embedding", "lacks lora_B of model.embed_tokens"),
        ("many magnitudes", "128 outputs and magnitudes of .8, 8."),
        ("link", "cannot open it"),
        ("huge header", "its header claims"),
        ("header", "header"),
        ('{"peft_type": "IA3"}', "of type IA3"),
        ('{"use_dora": true}', "14 projections have no magnitude"),
        ('{"bias": "all"}', "bias 'all' is not available"),
        ('{"lora_bias": true}', "lora_bias is not available"),
        ('{"trainable_token_indices": [1]}', "lacks the rows of the tokens"),
        ('{"trainable_token_indices": [1, 1]}', "names a token twice"),
        ('{"trainable_token_indices": {"embed_tokens": ["a"]}}', "must list 1 to 65,536 ids"),
        ('{"layer_replication": [[0, 2]]}', "adds layers to the base"),
        ('{"init_lora_weights": "pissa_niter_4"}', "changes the base's weights too"),
        ('{"r": 4}', "configuration says rank 4"),
        ('{"r": 0}', "r must be in"),
        ('{"r": "8"}', "r must be a whole number"),
        ('{"lora_alpha": null, "rank_pattern": {"q_proj": 3}}', "configuration says rank 3"),
        ('{"alpha_pattern": {"q(_proj)+": 3}}', "is a regular expression"),
        ('{"rank_pattern": [1]}', "must be a mapping"),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(what: str, text: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", 1)
    read_adapter(str(folder))
    broken(folder, what)
    with pytest.raises(ConfigError, match=text):
        read_adapter(str(folder))
