"""`banyan quantize FILE.gguf FOLDER`: what transformers loads of the folder has the numbers and the
logits of the file, words are those of the file, and what a folder cannot say is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from banyan.base.errors import BanyanError
from banyan.cli.quantize import quantize
from banyan.families import FAMILIES, GGUF, known_gguf
from banyan.model_config.export import hub_keys
from banyan.model_config.model_config import ModelConfig
from banyan.models.quantize.layouts import gguf_header, gguf_pair
from banyan.ops.bind import bind
from banyan.tokenizer.load import load_tokenizer
from banyan.tokenizer.write import folder_words, gguf_words
from tests.models import test_gguf as llama
from tests.models import test_gguf_experts as experts
from tests.models import test_gguf_families as dense
from tests.models import test_gguf_hybrids as hybrids
from tests.models import test_gpt_oss as gpt_oss
from tests.models.families import EXPERTS, VARIANTS, rewrite_config, tiny
from tests.models.quantize.test_quantize import (
    NEAR,
    Cut,
    cut_after,
    made,
    read_by_the_tool,
    tensors_of,
)
from tests.support.logits import PROMPT, load
from tests.system.checkpoint import write_tiny_model

TOKENIZERS = Path(__file__).parents[4] / "shared" / "data" / "tokenizers"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
WORDS = "It's 1234567 o'clock;\u00a0e\u0301\r\n\n  \u4f60 \U0001f600 <|im_start|>x<|im_end|> a_b"
IS_ALL = os.environ.get("FORMS") == "all"
DENSE = ("qwen2", "qwen3", "gemma3", "phi3, longrope on part of a head", "starcoder2", "glm4")
WITH_EXPERTS = (
    *("mixtral", "qwen2 moe", "qwen3 moe", "granite moe", "ernie 4.5 moe"),
    *("deepseek v2, groups, yarn", "deepseek v3, split expansion"),
)
"""The others: make test-forms."""
CPU = torch.device("cpu")


def opened(folder: Path) -> Any:
    """What transformers makes of it, with nothing missing and nothing left over."""
    loader: Any = transformers.AutoModelForCausalLM
    model, reported = loader.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not reported["missing_keys"] and not reported["unexpected_keys"], reported
    model.config._experts_implementation = "eager"
    return model


def check_like(folder: Path, expected: dict[str, torch.Tensor], file: Path, ops, paged) -> None:
    """transformers has the expected numbers of the folder, and the logits that we have of the file,
    which are those that we have of the folder."""
    model = opened(folder)
    found = model.state_dict()
    for name, values in expected.items():
        is_moved = name.endswith("norm.weight") and model.config.model_type.startswith("gemma")
        # The file holds these plus one.
        assert (found[name] - values).abs().max() <= (2**-23 if is_moved else 0), name
    (logits,) = paged(load(file, ops)).step([(0, PROMPT)])
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0)
    (ours,) = paged(load(folder, ops)).step([(0, PROMPT)])
    torch.testing.assert_close(logits, ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", [c for c in dense.CASES if c in VARIANTS] if IS_ALL else DENSE)
def test_a_folder_has_the_numbers_and_logits_of_the_file(case, ops, paged, tmp_path, monkeypatch):
    architecture, changes = dense.CASES[case]
    family, own = VARIANTS[case]
    monkeypatch.setitem(VARIANTS, case, (family, {**own, **dense.SIZES, **changes}))
    reference = tiny(case, tmp_path / "in")
    dense.convert(reference, architecture, tmp_path / "in.gguf")

    out = made(tmp_path / "in.gguf", tmp_path / "out", "f32")

    check_like(out, reference.state_dict(), tmp_path / "in.gguf", ops, paged)


@pytest.mark.parametrize("case", experts.CASES if IS_ALL else WITH_EXPERTS)
def test_stacks_of_experts_are_taken_apart(case, ops, paged, tmp_path, monkeypatch):
    variant = experts.variant_of(case)
    family, own = EXPERTS[variant]
    sizes = {**own, **experts.SIZES, **experts.CASES[case][1]}
    monkeypatch.setitem(EXPERTS, variant, (family, sizes))
    reference = tiny(variant, tmp_path / "in")
    file = experts.convert(tmp_path / "in", case, reference.config)

    out = made(file, tmp_path / "out", "f32")

    check_like(out, opened(tmp_path / "in").state_dict(), file, ops, paged)


def test_gates_and_ups_of_gpt_oss_take_turns_again(paged, tmp_path):
    exact = bind("cpu", CPU, torch.float32, frozenset(), 16, forced={"linear": "reference"})
    config = tiny("gpt-oss", tmp_path / "in", **gpt_oss.SIZES, swiglu_limit=7.0).config
    file = Path(gpt_oss.convert(tmp_path / "in", config))

    out = made(file, tmp_path / "out", "f32")

    check_like(out, opened(tmp_path / "in").state_dict(), file, exact, paged)
    apart = made(file, tmp_path / "apart", "int8", "--allow-requantize")
    assert "model.layers.1.mlp.experts.4.up_proj.bias" in tensors_of(apart)


@pytest.mark.parametrize("type", ["f32", "bf16"])
def test_llama_comes_back_bit_for_bit(type, tiny_llama, ops, paged, tmp_path):
    """Rows of queries and keys lie in pairs in the file, and the divisors are a tensor of it."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    reference, model_config = tiny_llama(
        **sizes, rope_parameters=LLAMA3, max_position_embeddings=9000
    )
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[type]
    for parameter in reference.parameters():
        parameter.data.copy_(parameter.to(dtype))
    file = tmp_path / "in.gguf"
    divisors = 1 / (reference.model.rotary_emb.inv_freq * 5e5 ** (torch.arange(0, 16, 2) / 16))
    llama.convert(reference, file, type.upper(), divisors.numpy(), dense.describe)

    out = made(file, tmp_path / "out", type)

    found = tensors_of(out)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == str(dtype)[6:]
    check_like(out, reference.state_dict(), file, ops, paged)


@pytest.fixture(scope="module")
def file_of_experts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    with pytest.MonkeyPatch.context() as patched:
        family, own = EXPERTS["qwen3 moe"]
        sizes = {**own, **experts.SIZES, **experts.CASES["qwen3 moe"][1]}
        patched.setitem(EXPERTS, "qwen3 moe", (family, sizes))
        return experts.convert(folder, "qwen3 moe", tiny("qwen3 moe", folder).config)


@pytest.mark.parametrize("type", ["int8", "w4a16", "fp8-block"])
def test_a_file_becomes_what_compressed_tensors_reads(type, file_of_experts, ops, paged, tmp_path):
    exact = tensors_of(made(file_of_experts, tmp_path / "exact", "f32"))

    out = made(file_of_experts, tmp_path / "out", type, "--allow-requantize")

    theirs = read_by_the_tool(out)
    assert any(".experts.4.down_proj" in name for name in theirs)
    for name, weight in theirs.items():
        lost = (weight - exact[name]).square().mean().sqrt()
        assert lost < 1.1 * NEAR[type] * exact[name].square().mean().sqrt(), name
    rest = {name: tensor for name, tensor in tensors_of(out).items() if name in exact}
    assert {tensor.dtype for name, tensor in rest.items() if "norm" in name} == {torch.bfloat16}
    as_floats = tmp_path / "exact" / "model.safetensors"
    save_file({n: t.float() for n, t in (exact | rest | theirs).items()}, as_floats)
    (logits,) = paged(load(out, ops)).step([(0, PROMPT)])
    (expected,) = paged(load(tmp_path / "exact", ops)).step([(0, PROMPT)])
    assert (logits - expected).std() < 0.02 * expected.std()


def test_a_folder_that_is_cut_off_goes_on_where_it_was(
    file_of_experts, tmp_path, monkeypatch, capsys
):
    words = ("bf16", "--max-shard-gib", str(60_000 / 2**30))
    whole = made(file_of_experts, tmp_path / "whole", *words)
    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 30)
        made(file_of_experts, out, *words)
    assert len(list(out.glob("*.safetensors"))) >= 1 and not (out / "config.json").exists()

    made(file_of_experts, out, *words)

    assert "were whole already" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {file.name for file in whole.iterdir()}
    for file in whole.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes()


def test_a_folder_goes_to_a_file_and_back(tmp_path, capsys):
    """Numbers, words, the chat template and what ends an answer; the report is made."""
    write_tiny_model(tmp_path / "in")
    before = {n: t.half() for n, t in load_file(tmp_path / "in" / "model.safetensors").items()}
    save_file(before, tmp_path / "in" / "model.safetensors")
    rewrite_config(tmp_path / "in", torch_dtype="float16")
    file = made(tmp_path / "in", tmp_path / "file.gguf", "f16")

    assert quantize([str(file), str(tmp_path / "out"), "--type", "f32"]) == 0

    assert "KL 0.0000 in the mean" in capsys.readouterr().out
    found = tensors_of(tmp_path / "out")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name].float()) for name in before)
    mine, its = (load_tokenizer(str(tmp_path / name)) for name in ("in", "out"))
    assert mine.encode(WORDS) == its.encode(WORDS)
    assert (mine.facts.chat_template, mine.eos_ids) == (its.facts.chat_template, its.eos_ids)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(WORDS)["input_ids"] == mine.encode(WORDS)
    chat = [{"role": "user", "content": "Hello"}]
    known = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    assert theirs.apply_chat_template(chat) == known.apply_chat_template(chat)


def file_of_words(path: Path, keys: dict[str, object]) -> Path:
    pairs = {"general.architecture": "llama", **keys}
    path.write_bytes(gguf_header([gguf_pair(key, pairs[key]) for key in pairs], []).octets)
    return path


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, octets in files.items():
        (folder / name).write_bytes(octets)
    return folder


def check_words(file: Path, folder: Path, texts: tuple[str, ...]) -> None:
    """The ids of a file, of the folder made of it, and what transformers makes of that."""
    mine, its = load_tokenizer(str(file)), load_tokenizer(str(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        assert mine.encode(text) == its.encode(text) == theirs(text)["input_ids"], text
        bare = mine.encode(text, add_special_tokens=False)
        assert bare == theirs(text, add_special_tokens=False)["input_ids"], text
    assert mine.special_ids == its.special_ids and {*mine.eos_ids} <= {*its.eos_ids}


def test_a_published_vocabulary_comes_back(tmp_path):
    """Byte-level BPE; a text begins with a token of its own."""
    source = TOKENIZERS / "llama3_1"
    if not source.is_dir():
        pytest.skip(f"there is no {source}")
    known = load_tokenizer(str(source))
    ids = {f"tokenizer.ggml.{n}_token_id": i for n, i in (("bos", known.bos_id), ("eos", 128009))}
    keys = ids | gguf_words(str(source), known.vocab_size, ids)
    file = file_of_words(tmp_path / "words.gguf", keys)

    out = written(tmp_path / "out", folder_words(str(file), 4096, (128009, 128008)))

    check_words(file, out, (WORDS, "a", "", "<|eot_id|> \t\n"))
    assert load_tokenizer(str(out)).encode(WORDS) == known.encode(WORDS)
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert ends[:2] == [128009, 128008]


def test_sentence_pieces_come_along(tmp_path):
    """Marks for spaces, bytes for what has no piece, a start and an end around a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{octet:02X}>" for octet in range(256))]
    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "abc", "\u2581c"]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "tokenizer.ggml.scores": [*[0.0] * 259, *(-float(i) for i in range(len(words)))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.chat_template": "{{ messages[0].content }}",
        "tokenizer.chat_template.tools": "{{ tools }}",
    }
    file = file_of_words(tmp_path / "words.gguf", keys)

    out = written(tmp_path / "out", folder_words(str(file), 4096, ()))

    check_words(file, out, ("abc ab  c</s>a", "\u4f60\U0001f600\n", "a", " b"))
    assert load_tokenizer(str(out)).facts.chat_templates == {
        "default": "{{ messages[0].content }}",
        "tools": "{{ tools }}",
    }


def test_every_architecture_is_written_or_refused_by_name():
    """Which ones are refused stands in docs/quantization.md."""
    refused = set[str]()
    for name in known_gguf():
        form = FAMILIES.load(GGUF + name).gguf
        assert form is not None
        model_config = ModelConfig("", "gguf", form.architecture, name, 9, 8, 8, 1, 1, 1, 8, 64)
        model_config = replace(model_config, attention_scale=1.0)
        try:
            hub_keys(model_config, "float32")
        except BanyanError as error:
            assert name in str(error) and form.architecture in str(error)
            refused.add(name)
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text()
    reported = (
        page.partition("These architectures are refused: ")[2].partition(".")[0].replace("\n", " ")
    )
    assert refused == {name.strip("` ") for name in reported.split(",")}


def test_layers_with_states_are_refused_before_anything_is_written(tmp_path):
    _, path = hybrids.made("qwen3 next", tmp_path)
    out = tmp_path / "out"

    with pytest.raises(BanyanError, match=r"no config\.json is made for Qwen3NextForCausalLM"):
        made(Path(path), out, "bf16")

    assert not out.exists()


def test_a_fact_that_config_json_has_no_key_for_is_refused(tmp_path, file_of_experts, monkeypatch):
    monkeypatch.setattr("banyan.model_config.export._like_qwen", lambda experts: {"num_experts": 5})

    with pytest.raises(BanyanError, match=r"config\.json does not hold all facts of .*num_exp"):
        made(file_of_experts, tmp_path / "out", "bf16")

    assert not (tmp_path / "out").exists()
