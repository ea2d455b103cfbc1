"""`banyan quantize`: what it writes is what others read, and what is served; cuts, and refusals."""

import copy
import json
from pathlib import Path

import gguf
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import match_name
from safetensors.torch import load_file, save_file

from banyan.base.errors import BanyanError, CapacityError, ConfigError
from banyan.bench.fidelity import Divergence
from banyan.cli import quantize as quantize_verb
from banyan.cli.quantize import FLOAT_TYPES, GGUF_TYPES, HUB_TYPES, quantize, verdict_on
from banyan.models.quantize import writer as folder
from banyan.models.quantize import writer as work
from banyan.models.quantize.layouts import TYPES, layout_of
from banyan.ops.stored import StoredWeight
from tests.models.families import rewrite_config, tiny
from tests.models.quantised_checkpoints import SIZES, restore
from tests.models.test_gguf_families import convert
from tests.support.logits import PROMPT, load
from tests.system.checkpoint import write_tiny_model

NEAR = {"int8": 0.01, "w8a16": 0.01, "w4a16": 0.13, "fp8": 0.05, "fp8-block": 0.05}
"""Root of the mean squared error of a rounded weight, as a share of its own."""


def made(source: Path, target: Path, type: str, *words: str) -> Path:
    assert quantize([str(source), str(target), "--type", type, "--no-report", *words]) == 0
    return target


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for shard in found for name, tensor in shard.items()}


def read_by_the_tool(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight that compressed-tensors itself makes of the numbers and of config.json."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    schemes = [QuantizationScheme(**group) for group in settings["config_groups"].values()]
    tensors, found = tensors_of(folder), {}
    for stem in [n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")]:
        parts = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{stem}.")}
        by_name = [s for s in schemes if any(match_name(stem, t) for t in s.targets)]
        scheme = (by_name or schemes)[0]
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        bias = parts.pop("bias", None)
        assert bias is None or bias.dtype == torch.float32
        found[f"{stem}.weight"] = compressor.decompress(parts, scheme)["weight"].float()
    return found


@pytest.mark.parametrize("type", HUB_TYPES)
def test_a_folder_is_what_compressed_tensors_reads_and_what_is_served(
    type,
    ops,
    paged,
    tmp_path,
):
    reference = tiny("qwen2", tmp_path / "in", **SIZES)
    source = load_file(tmp_path / "in" / "model.safetensors")

    out = made(tmp_path / "in", tmp_path / "out", type)

    theirs, ours = read_by_the_tool(out), restore(out)
    assert theirs.keys() == {n for n in source if n.endswith("_proj.weight")}
    for name, weight in theirs.items():
        assert (ours[name].dense.float() - weight).abs().max() <= weight.abs().max() * 2**-8
        lost = (weight - source[name]).square().mean().sqrt()
        assert lost < NEAR[type] * source[name].square().mean().sqrt()
    assert torch.equal(ours["model.embed_tokens.weight"].dense, source["model.embed_tokens.weight"])
    reference.load_state_dict(reference.state_dict() | theirs)
    (logits,) = paged(load(out, ops)).step([(0, PROMPT)])
    expected = reference(torch.tensor([PROMPT])).logits[0].detach()
    assert (logits - expected).std() < 0.01 * expected.std()


def test_transformers_serves_the_folder_with_the_same_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    tiny("qwen2", tmp_path / "in", **SIZES)
    out = made(tmp_path / "in", tmp_path / "out", "w4a16")

    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)

    logits = model(torch.tensor([PROMPT])).logits[0].detach()
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    same.load_state_dict(same.state_dict() | read_by_the_tool(out))
    torch.testing.assert_close(logits, same(torch.tensor([PROMPT])).logits[0], atol=1e-3, rtol=1e-3)


def test_a_group_that_does_not_divide_is_halved_and_named_in_the_configuration(tmp_path, capsys):
    tiny("qwen2", tmp_path / "in", **SIZES)  # 128 inputs, and 192 of down_proj

    out = made(tmp_path / "in", tmp_path / "out", "w4a16", "--ignore", "re:.*layers.0.*up_proj")

    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    groups = {g["weights"]["group_size"]: g["targets"] for g in settings["config_groups"].values()}
    assert groups == {128: ["Linear"], 64: [r"re:model\.layers\.\d+\.mlp\.down_proj$"]}
    assert set(settings["ignore"]) == {"model.layers.0.mlp.up_proj", "lm_head"}
    assert "1 projections named by --ignore" in capsys.readouterr().out
    assert restore(out)["model.layers.0.mlp.up_proj.weight"].type == "F32"


@pytest.mark.parametrize("variant", ["qwen3 moe", "deepseek v2"])
def test_experts_and_latent_attention_are_rounded_and_routers_are_not(
    variant,
    ops,
    paged,
    tmp_path,
):
    reference = tiny(variant, tmp_path / "in")

    out = made(tmp_path / "in", tmp_path / "out", "int8")

    theirs = read_by_the_tool(out)
    assert any(".experts.1." in name for name in theirs)
    assert not any(name.endswith(".mlp.gate.weight") for name in theirs)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert r"re:model\.layers\.\d+\.mlp\.gate$" in settings["ignore"]
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    save_file(tensors | theirs, tmp_path / "in" / "model.safetensors")
    (expected,) = paged(load(tmp_path / "in", ops)).step([(0, PROMPT)])
    (logits,) = paged(load(out, ops)).step([(0, PROMPT)])
    assert (logits - expected).std() < 0.01 * expected.std()
    assert reference.config.num_hidden_layers == 4


STACK_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NUM_EXPERTS = 5
STACKED = {
    "granite moe": ("block_sparse_moe", ("w1", "w3", "w2"), {"intermediate_size": 64}),
    "gpt-oss": ("mlp", ("gate_proj", "up_proj", "down_proj"), {"intermediate_size": 64}),
    "qwen3 moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), {"moe_intermediate_size": 64}),
    "mixtral": (
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        {"intermediate_size": 64, "num_local_experts": NUM_EXPERTS},
    ),
}
"""Families that have a tensor for all experts of a layer, or have one when transformers saves its
own form -> the block of a quantised folder, and what each expert's gate, up and down are called."""


def experts_of(model, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of gate, up and down, outputs first, in the tensors of transformers."""
    block = model.model.layers[layer]
    experts = (getattr(block, "block_sparse_moe", None) or block.mlp).experts
    both, down = experts.gate_up_proj.detach()[expert], experts.down_proj.detach()[expert]
    if "GptOss" in type(model).__name__:
        return both[:, ::2].T, both[:, 1::2].T, down.T
    return both[: len(both) // 2], both[len(both) // 2 :], down


@pytest.mark.parametrize("variant", STACKED)
@pytest.mark.parametrize("type", ["w4a16", "int8"])
def test_stacks_of_experts_become_a_module_for_each(variant, type, ops, paged, tmp_path):
    block, names, sizes = STACKED[variant]
    reference = tiny(variant, tmp_path / "whole", **STACK_SIZES, **sizes)
    reference.save_pretrained(tmp_path / "in", save_original_format=False)
    before = load_file(tmp_path / "in" / "model.safetensors")
    assert not any(".experts.0." in name for name in before)

    out = made(tmp_path / "in", tmp_path / "out", type)

    theirs, rest = read_by_the_tool(out), dict(reference.state_dict())
    for layer in range(2):
        for expert in range(NUM_EXPERTS):
            for name, mine in zip(names, experts_of(reference, layer, expert), strict=True):
                stem = f"model.layers.{layer}.{block}.experts.{expert}.{name}"
                weight = theirs.pop(f"{stem}.weight")
                lost = (weight - mine).square().mean().sqrt()
                assert 0 < lost < NEAR[type] * mine.square().mean().sqrt(), stem
                mine.copy_(weight)
    assert {name.split(".")[3] for name in theirs} == {"self_attn"}
    reference.load_state_dict(rest | theirs)
    (logits,) = paged(load(out, ops)).step([(0, PROMPT)])
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits - expected).std() < 0.01 * expected.std()


def test_biases_of_stacks_and_stacks_that_do_not_fit_are_copied(ops, paged, tmp_path):
    """Inner widths of 80 have no group of 32 inputs: down stays, expert by expert."""
    reference = tiny("gpt-oss", tmp_path / "in", **STACK_SIZES)
    source = load_file(tmp_path / "in" / "model.safetensors")

    out = tensors_of(made(tmp_path / "in", tmp_path / "out", "w4a16"))

    stem = "model.layers.1.mlp.experts"
    for expert in range(NUM_EXPERTS):
        bias = source[f"{stem}.gate_up_proj_bias"][expert]
        assert torch.equal(out[f"{stem}.{expert}.gate_proj.bias"], bias[::2])
        assert torch.equal(out[f"{stem}.{expert}.up_proj.bias"], bias[1::2])
        down = source[f"{stem}.down_proj"][expert]
        assert torch.equal(out[f"{stem}.{expert}.down_proj.weight"], down.T)
        assert torch.equal(
            out[f"{stem}.{expert}.down_proj.bias"], source[f"{stem}.down_proj_bias"][expert]
        )
        assert f"{stem}.{expert}.up_proj.weight_packed" in out
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.down_proj$" in settings["ignore"]
    (logits,) = paged(load(tmp_path / "out", ops)).step([(0, PROMPT)])
    with torch.no_grad():
        assert (logits - reference(torch.tensor([PROMPT])).logits[0]).std() < 0.5


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 320}
    model = tiny("qwen2", folder / "in", **{**SIZES, **sizes})
    convert(model, "qwen2", folder / "in.gguf")
    return model, folder / "in.gguf"


SERVED = ("q8_0", "q5_1", "q4_k")
"""What each type means is held against its tool in tests/ops; a few are served here."""


@pytest.mark.parametrize("type", GGUF_TYPES)
def test_a_gguf_file_is_what_its_own_tool_reads_and_what_is_served(
    type,
    gguf_model,
    ops,
    paged,
    tmp_path,
):
    reference, source = gguf_model

    out = made(source, tmp_path / "out.gguf", type, "--allow-requantize")

    reader, names = gguf.GGUFReader(out), gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    theirs = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.1.attn_q.weight"] == type.upper()
    smaller = {"q4_k": "Q5_0", "q5_k": "Q5_1", "q6_k": "Q8_0"}.get(type, type.upper())
    assert kinds["blk.1.ffn_down.weight"] == smaller  # 320 inputs
    assert kinds["token_embd.weight"] == "Q8_0"  # as it was
    before = gguf.GGUFReader(source)
    assert reader.get_field("qwen2.block_count").contents() == 2
    assert reader.fields.keys() - before.fields.keys() <= {
        *("general.file_type", "general.quantization_version"),
    }
    if type not in SERVED:
        return
    state = {
        name: torch.tensor(theirs[names.get_name(name, try_suffixes=(".weight", ".bias"))])
        for name in reference.state_dict()
    }
    same = copy.deepcopy(reference)
    same.load_state_dict(state)
    (logits,) = paged(load(out, ops)).step([(0, PROMPT)])
    expected = same(torch.tensor([PROMPT])).logits[0].detach()
    assert (logits - expected).std() < 0.01 * expected.std()


class Cut(Exception):
    """The power fails."""


def cut_after(monkeypatch, count: int) -> None:
    write, left = work._write_unit, iter(range(count))

    def failing(*given):
        if next(left, None) is None:
            raise Cut
        write(*given)

    monkeypatch.setattr(work, "_write_unit", failing)


SHARDS = ("--max-shard-gib", str(60_000 / 2**30))


def test_a_run_that_is_cut_off_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Finished files are not made again, half ones are, and damaged ones too."""
    tiny("qwen2", tmp_path / "in", **SIZES)
    whole = made(tmp_path / "in", tmp_path / "whole", "int8", *SHARDS)
    names = sorted(file.name for file in whole.iterdir())
    assert "model.safetensors.index.json" in names and len(names) > 4
    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 20)
        made(tmp_path / "in", out, "int8", *SHARDS)
    finished = sorted(out.glob("*.safetensors"))
    assert len(finished) >= 2 and len(list(out.glob("*.part"))) == 1
    assert not (out / "config.json").exists()
    raw = bytearray(finished[1].read_bytes())
    raw[-1] ^= 1
    finished[1].write_bytes(raw)
    before = finished[0].stat().st_ino, finished[0].stat().st_mtime_ns
    with (out / ".progress").open("a") as record:
        record.write('{"file": "model-0')  # a line that was cut off

    made(tmp_path / "in", out, "int8", *SHARDS)

    assert (finished[0].stat().st_ino, finished[0].stat().st_mtime_ns) == before
    assert "were whole already" in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == names
    for name in names:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_gguf_file_that_is_cut_off_goes_on_within(gguf_model, tmp_path, monkeypatch, capsys):
    source, words = gguf_model[1], ("q4_0", "--allow-requantize", *SHARDS)
    whole = made(source, tmp_path / "whole.gguf", *words)
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 20)
        made(source, tmp_path / "out.gguf", *words)
    assert not (tmp_path / "out.gguf").exists() and (tmp_path / "out.gguf.part").exists()

    out = made(source, tmp_path / "out.gguf", *words)

    assert "were whole already" in capsys.readouterr().out
    assert out.read_bytes() == whole.read_bytes()
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"whole.gguf", "out.gguf"}


def test_the_report_holds_both_models_against_each_other_through_the_engine(tmp_path, capsys):
    write_tiny_model(tmp_path / "in")

    assert quantize([str(tmp_path / "in"), str(tmp_path / "out"), "--type", "int8"]) == 0

    line = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("fidelity"))
    words = line.split()
    assert int(words[1]) > 500 and words[3] == "KL" and 0 < float(words[4]) < 0.05
    assert "the same likeliest token at 9" in line


@pytest.mark.parametrize(
    ("same_top", "perplexity", "begins"),
    [
        (0.97, 10.1, "close"),
        (0.9, 10.1, "a visible loss"),
        (0.97, 10.9, "a visible loss"),
        (0.97, 11.1, "a large loss"),
        (0.58, 9.9, "a large loss"),
    ],
)
def test_the_report_judges_the_loss(same_top, perplexity, begins):
    found = Divergence(500, 0.1, 1.0, same_top, 10.0, perplexity)
    assert verdict_on(found).startswith(begins)


def test_a_full_disk_is_reported_before_and_while_it_is_written(tmp_path, monkeypatch):
    tiny("qwen2", tmp_path / "in", **SIZES)
    used = work.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(work.shutil, "disk_usage", lambda path: used._replace(free=1000))
        with pytest.raises(CapacityError, match=r"bytes are to be written.*1,000 are free"):
            made(tmp_path / "in", tmp_path / "out", "int8")

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(work, "_write_unit", full)
    with pytest.raises(CapacityError, match=r"cannot grow: No space.*goes on where it was"):
        made(tmp_path / "in", tmp_path / "out", "int8")


@pytest.mark.parametrize("at", ["_append", "write_other_files"])
def test_a_disk_that_fills_up_late_loses_nothing_that_is_whole(at, tmp_path, monkeypatch, capsys):
    """While the record grows, and while the files beside the weights are written."""
    tiny("qwen2", tmp_path / "in", **SIZES)
    whole = made(tmp_path / "in", tmp_path / "whole", "int8")
    keep, left = work.Record._append, iter(range(2))

    def full(*given):
        if at == "_append" and next(left, None) is not None:
            return keep(*given)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(work.Record if at == "_append" else folder, at, full)
        with pytest.raises(CapacityError, match=r"cannot grow: No space.*goes on where it was"):
            made(tmp_path / "in", tmp_path / "out", "int8", *(SHARDS if at == "_append" else ()))
    if at == "_append":
        return
    capsys.readouterr()
    made(tmp_path / "in", tmp_path / "out", "int8")
    assert "were whole already" in capsys.readouterr().out
    for file in whole.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_a_run_that_is_interrupted_says_that_it_can_go_on(tmp_path, monkeypatch, capsys):
    tiny("qwen2", tmp_path / "in", **SIZES)
    words = [str(tmp_path / "in"), str(tmp_path / "out"), "--type", "int8", "--no-report"]

    def pressed(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(work, "_write_unit", pressed)
        assert quantize(words) == 130
    assert "the same command goes on where it was" in capsys.readouterr().err
    assert quantize(words) == 0


@pytest.mark.parametrize("type", ["w4a16", "int8"])
def test_a_tied_head_and_biases_stay_as_they_are(type, ops, paged, tmp_path):
    reference = tiny("qwen2", tmp_path / "in", **SIZES, tie_word_embeddings=True)
    source = load_file(tmp_path / "in" / "model.safetensors")
    assert "lm_head.weight" not in source

    out = made(tmp_path / "in", tmp_path / "out", type)

    written = tensors_of(out)
    assert "lm_head.weight" not in written
    biases = [name for name in source if name.endswith("bias")]
    assert biases and all(torch.equal(written[name], source[name]) for name in biases)
    reference.load_state_dict(reference.state_dict() | read_by_the_tool(out))
    (logits,) = paged(load(out, ops)).step([(0, PROMPT)])
    expected = reference(torch.tensor([PROMPT])).logits[0].detach()
    assert (logits - expected).std() < 0.01 * expected.std()


def test_a_record_of_other_settings_is_not_gone_on_with(tmp_path, monkeypatch):
    tiny("qwen2", tmp_path / "in", **SIZES)
    with monkeypatch.context() as patched, pytest.raises(Cut):
        cut_after(patched, 3)
        made(tmp_path / "in", tmp_path / "out", "int8")
    with pytest.raises(ConfigError, match="of another source or with other settings"):
        made(tmp_path / "in", tmp_path / "out", "fp8")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["in", "out"], "--type is missing"),
        (
            ["in", "out", "--type", "int3"],
            "unknown --type 'int3'.*fp8-block, bf16, f32, q8_0",
        ),
        (["in", "--type", "int8"], "takes IN and OUT, and there are 1 words"),
        (["in", "out", "--type", "int8", "--bits", "3"], "there are 4 words"),
        (["nothing", "out", "--type", "int8"], "there is no model"),
        (["in", "in", "--type", "int8"], "OUT is IN"),
        (["in", "in/out", "--type", "int8"], "OUT is IN, or lies in it"),
        (["in", "full", "--type", "int8"], "is not empty"),
        (["in", "file", "--type", "int8"], "is a file"),
        (["in", "out", "--type", "q8_0"], "ends with .gguf"),
        (["in.gguf", "out.gguf", "--type", "q8_0"], "q8_0 already.*--allow-requantize"),
        (["in.gguf", "out", "--type", "q4_0", "--allow-requantize"], "ends with .gguf"),
        (["in.gguf", "file.gguf", "--type", "q4_0", "--allow-requantize"], "is there already"),
        (["in.gguf", "out", "--type", "int8"], "q8_0 already.*--allow-requantize"),
        (["in", "out", "--type", "bf16"], "makes a folder of a GGUF file, and .* of float32"),
        (["rounded", "out", "--type", "int8"], "compressed-tensors already"),
        (["in", "out", "--type", "w4a16", "--group-size", "48"], "a multiple of 32"),
        (["in", "out", "--type", "int8", "--max-shard-gib", "0"], "Choose 0.001 to 1024"),
        (["in", "out", "--type", "int8", "--ignore", "re:(x*)*"], "may take too long"),
        (["in", "out", "--type", "int8", "--ignore", "re:.*"], "no weight of .* can be rounded"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_sentence(words, match, gguf_model, tmp_path):
    for name in ("in", "rounded"):
        tiny("qwen2", tmp_path / name, **SIZES)
    rewrite_config(tmp_path / "rounded", quantization_config={"quant_method": "compressed-tensors"})
    (tmp_path / "in.gguf").write_bytes(gguf_model[1].read_bytes())
    (tmp_path / "full").mkdir()
    for name in ("full/file", "file", "file.gguf"):
        (tmp_path / name).write_text("something")
    first = [str(tmp_path / word) for word in words[:2] if not word.startswith("--")]
    paths = [*first, *words[len(first) :]]

    with pytest.raises(BanyanError, match=match):
        quantize([*paths, "--no-report"])

    assert not (tmp_path / "out").exists() and not (tmp_path / "out.gguf").exists()


def test_the_types_of_the_command_are_those_that_are_made():
    assert (*HUB_TYPES, *FLOAT_TYPES, *GGUF_TYPES) == TYPES
    for type in TYPES:
        is_folder = layout_of(type, 128).container == "safetensors"
        assert is_folder == (type not in GGUF_TYPES), type
        assert type in quantize_verb._ABOUT or type in GGUF_TYPES


def test_a_weight_is_rounded_in_pieces_of_rows_as_in_one(monkeypatch):
    from banyan.models.quantize import layouts

    weight = StoredWeight.from_tensor(torch.randn(300, 256).bfloat16())
    for type in TYPES:
        rounded = layout_of(type, 128).plan("x.weight", (300, 256), "BF16")
        monkeypatch.setattr(layouts, "_CHUNK", 1 << 24)
        once = rounded.make(weight)
        monkeypatch.setattr(layouts, "_CHUNK", 1 << 10)
        for name, octets in rounded.make(weight).items():
            assert torch.equal(octets, once[name]), type
