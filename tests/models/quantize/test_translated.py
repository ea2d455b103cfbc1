"""`banyan quantize FOLDER OUT.gguf`: names, order and keys are those of published converters, words
are split as the folder splits them, and what a file cannot say is refused before it is written."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from banyan.base.errors import BanyanError
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.export import differences
from banyan.models.quantize.source import SourceCheckpoint
from banyan.models.quantize.translate import translated
from banyan.tokenizer.load import load_tokenizer
from banyan.tokenizer.write import gguf_words
from tests.models import test_gguf_experts as experts
from tests.models import test_gguf_families as dense
from tests.models.families import EXPERTS, VARIANTS, rewrite_config, tiny
from tests.models.quantize.test_quantize import Cut, cut_after, made
from tests.support.logits import PROMPT, load
from tests.system.checkpoint import write_tiny_model

IS_ALL = os.environ.get("FORMS") == "all"
"""All families: make test-forms."""
DENSE = (
    *("qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite, all factors", "glm4"),
    *("starcoder2", "cohere2", "ernie 4.5", "hunyuan"),
)
WITH_EXPERTS = (
    *("mixtral", "olmoe", "qwen2 moe", "qwen3 moe", "dots1", "ernie 4.5 moe", "granite moe"),
    *("minimax m2", "hunyuan moe"),
)
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
TOKENIZERS = Path(__file__).parents[4] / "shared" / "data" / "tokenizers"
_LESS = 0.01
"""The other file is of Q8_0: half a step of a block's largest number, 1/254."""


def values_of(path: Path) -> dict[str, np.ndarray]:
    reader = gguf.GGUFReader(path)
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def check_like(ours: Path, theirs: Path) -> None:
    mine, its = values_of(ours), values_of(theirs)
    assert mine.keys() == its.keys()
    for name, expected in its.items():
        assert mine[name].shape == expected.shape, name
        assert np.abs(mine[name] - expected).max() <= _LESS * np.abs(expected).max(), name
    keys, known = (gguf.GGUFReader(path).fields.keys() for path in (ours, theirs))
    assert {*known} - {*keys} == set(), "keys of published converters are missing"


@pytest.mark.parametrize("case", DENSE if IS_ALL else DENSE[::3])
def test_a_file_is_that_of_published_converters(case, ops, paged, tmp_path, monkeypatch):
    architecture, changes = dense.CASES[case]
    family, own = VARIANTS[case]
    monkeypatch.setitem(VARIANTS, case, (family, {**own, **dense.SIZES, **changes}))
    reference = tiny(case, tmp_path / "in")
    dense.convert(reference, architecture, tmp_path / "theirs.gguf")

    out = made(tmp_path / "in", tmp_path / "out.gguf", "f16")

    check_like(out, tmp_path / "theirs.gguf")
    check_served(out, tmp_path / "in", ops, paged)


@pytest.mark.parametrize("case", WITH_EXPERTS if IS_ALL else WITH_EXPERTS[::2])
def test_experts_lie_in_stacks(case, ops, paged, tmp_path, monkeypatch):
    family, own = EXPERTS[case]
    sizes = {**own, **experts.SIZES, **experts.CASES[case][1]}
    monkeypatch.setitem(EXPERTS, case, (family, sizes))
    reference = tiny(case, tmp_path / "in")
    out = made(tmp_path / "in", tmp_path / "out.gguf", "f16")
    check_served(out, tmp_path / "in", ops, paged)

    theirs = experts.convert(tmp_path / "in", case, reference.config)

    check_like(out, theirs)


def check_served(out: Path, folder: Path, ops, paged) -> None:
    assert not differences(read_model_config(str(folder)), read_model_config(str(out)))
    (logits,) = paged(load(out, ops)).step([(0, PROMPT)])
    (expected,) = paged(load(folder, ops)).step([(0, PROMPT)])
    assert (logits - expected).std() < 0.01 * expected.std()


@pytest.mark.parametrize("type", ["q4_0", "q8_0"])
def test_stacks_of_gpt_oss_are_rounded_and_served(type, ops, paged, tmp_path):
    """Gates and ups that take turns, biases, sinks, windows."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    tiny("gpt-oss", tmp_path / "in", **sizes, num_key_value_heads=2, swiglu_limit=7.0)

    out = made(tmp_path / "in", tmp_path / "out.gguf", type)

    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert kinds["blk.1.ffn_up_exps.weight"] == kinds["blk.1.attn_q.weight"] == type.upper()
    assert kinds["blk.1.ffn_gate_inp.weight"] == kinds["blk.1.attn_sinks.weight"] == "F32"
    exact, rounded = tmp_path / "exact.gguf", values_of(out)
    for name, values in values_of(made(tmp_path / "in", exact, "f16")).items():
        assert rounded[name].shape == values.shape
        assert np.abs(rounded[name] - values).max() <= 0.2 * np.abs(values).max(), name
    check_served(exact, tmp_path / "in", ops, paged)


def test_llama_3s_stretching_is_a_tensor(ops, paged, tmp_path):
    """Also: rows of queries and keys come in pairs."""
    write_tiny_model(tmp_path / "in")
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rewrite_config(tmp_path / "in", rope_scaling=rope)

    out = made(tmp_path / "in", tmp_path / "out.gguf", "f16")

    assert values_of(out)["rope_freqs.weight"].max() == 8
    check_served(out, tmp_path / "in", ops, paged)


@pytest.mark.parametrize(("name", "splits"), [("llama3_1", "llama-bpe")])
def test_published_vocabularies_get_the_names_that_they_have(name, splits):
    folder = TOKENIZERS / name
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    tokenizer = load_tokenizer(str(folder))
    ids = {} if tokenizer.bos_id is None else {"tokenizer.ggml.bos_token_id": tokenizer.bos_id}

    keys = gguf_words(str(folder), tokenizer.vocab_size + 5, ids)

    assert keys["tokenizer.ggml.pre"] == splits
    assert len(keys["tokenizer.ggml.tokens"]) == tokenizer.vocab_size + 5


def test_a_translation_that_is_cut_off_goes_on_within(tmp_path, monkeypatch, capsys):
    tiny("qwen3 moe", tmp_path / "in")
    shards = ("--max-shard-gib", str(30_000 / 2**30))
    whole = made(tmp_path / "in", tmp_path / "whole.gguf", "f16", *shards)
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 20)
        made(tmp_path / "in", tmp_path / "out.gguf", "f16", *shards)

    out = made(tmp_path / "in", tmp_path / "out.gguf", "f16", *shards)

    assert "were whole already" in capsys.readouterr().out
    assert out.read_bytes() == whole.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"in", "whole.gguf", "out.gguf"}


@pytest.mark.parametrize(
    ("variant", "changes", "match"),
    [
        ("gpt-oss", {"swiglu_limit": 0.6}, r"experts.limit is 0.6, not 7.0"),
        ("deepseek v3", {}, "no GGUF architecture is known for DeepseekV3ForCausalLM"),
        ("deepseek v2", {}, "kv_lora_rank must be a whole number"),
        ("qwen2", {"rope_parameters": _DYNAMIC}, "rope.kind is dynamic, not default"),
    ],
)
def test_what_a_file_cannot_say_is_refused_before_it_is_written(variant, changes, match, tmp_path):
    tiny(variant, tmp_path / "in", **changes)

    with pytest.raises(BanyanError, match=match):
        made(tmp_path / "in", tmp_path / "out.gguf", "f16")

    assert {file.name for file in tmp_path.iterdir()} == {"in"}


@pytest.mark.parametrize("case", ["gpt2", "bloom"])
def test_rows_in_an_order_of_their_own_are_refused(case, tmp_path):
    tiny(case, tmp_path)

    with pytest.raises(BanyanError, match="an order of its own"):
        translated(SourceCheckpoint(read_model_config(str(tmp_path))))
