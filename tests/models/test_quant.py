"""Quantised checkpoints: what the tensors of a format mean together, and what cannot be."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ConfigError, ModelError
from banyan.config.checkpoint import read_card
from banyan.config.quantized import SPELLINGS
from banyan.formats.kept import kept_bytes
from banyan.layers.build import Build
from banyan.models.weights import quant
from banyan.models.weights.loader import load_model, tensors_of
from banyan.models.weights.quant import open_method
from banyan.models.weights.quant.base import restored
from banyan.models.weights.quant.fp8 import Fp8, plain
from banyan.models.weights.quant.modelslim import ModelSlim
from banyan.models.weights.quant.sizes import kept_size_of_folder
from banyan.models.weights.reader import read_tensors, tensor_types
from banyan.ops.bind import bind, open_toolkit
from banyan.ops.stored import RawTensor, StoredWeight
from banyan.parallel.groups import Group, Groups
from tests.models.families import rewrite_config, tiny
from tests.models.quantised import FORMS, Form, by_block, modelslim_four_bits, quark_settings
from tests.models.test_families import PROMPT, load

CPU = torch.device("cpu")
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def rewrite_weights(folder: Path, form) -> dict[str, torch.Tensor]:
    """Replace each projection's weight by what the form makes of it; returns the meant weights by
    name."""
    path = folder / "model.safetensors"
    tensors, meant = {}, {}
    for name, tensor in load_file(path).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        parts, meant[name] = form.change(tensor)
        tensors |= {f"{stem}.{last}": part.contiguous().clone() for last, part in parts.items()}
    save_file(tensors, path)
    for file, describe in form.files.items():
        (folder / file).write_text(json.dumps(describe(list(tensors))))
    return meant


def quantised(name: str, folder: Path, variant: str = "qwen2", **sizes):
    """A quantised checkpoint, and the transformers model of the weights that it means."""
    form = FORMS[name]
    reference = tiny(variant, folder, **{**SIZES, **sizes})
    meant = rewrite_weights(folder, form)
    if form.settings is not None:
        rewrite_config(folder, quantization_config=form.settings)
    state = reference.state_dict()
    state |= {name: weight for name, weight in meant.items() if name in state}
    reference.load_state_dict(state)
    return reference, meant


def restore(folder: Path):
    card = read_card(str(folder))
    method = open_method(card.quant, "here")
    return dict(restored(read_tensors(card), tensor_types(card), method, card.quant.method))


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_that_are_meant_in_few_bits(name, tmp_path):
    _, meant = quantised(name, tmp_path)

    weights = restore(tmp_path)

    for weight, values in meant.items():
        error = (weights[weight].dense.float() - values).abs().max()
        assert error <= values.abs().max() * 2**-8
        assert weights[weight].type in FORMS[name].becomes.split(" or ")
    assert weights["model.norm.weight"].type == "F32"
    card = read_card(str(tmp_path))
    kept = [kept_bytes(w.type, w.shape) or w.raw.numel() for w in weights.values()]
    assert kept_size_of_folder(card, keeps_fp8=True) == sum(kept)
    wide = [
        n * 2 * 32 // 36 if w.type == "E4M3" else n
        for n, w in zip(kept, weights.values(), strict=True)
    ]
    assert kept_size_of_folder(card, keeps_fp8=False) == sum(wide)


@pytest.mark.parametrize("name", FORMS)
def test_logits_equal_those_of_the_weights_that_are_meant(name, ops, paged, tmp_path):
    reference, _ = quantised(name, tmp_path)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits - expected).std() < 0.01 * expected.std()


@pytest.fixture(scope="module")
def compiled():
    toolkit = open_toolkit("cpu", 1, {})
    if toolkit.absence:
        pytest.skip(f"the compiled kernels cannot be built here: {toolkit.absence}")
    return bind("cpu", CPU, torch.float32, frozenset(), 16, toolkit=toolkit)


ONE_OF_EACH_TYPE = {
    FORMS[name].becomes: name
    for name in (
        *("gptq 4", "awq", "compressed-tensors mxfp4", "w8a8_int8"),
        *("bitsandbytes nf4", "fp8 in blocks"),
    )
}


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE.values())
def test_compiled_products_are_those_of_the_weights_that_are_meant(name, compiled, tmp_path):
    """Also of the share of a rank that holds half of the inputs; activations round to 8 bits."""
    _, meant = quantised(name, tmp_path)
    weight = "model.layers.1.mlp.down_proj.weight"
    stored, values = restore(tmp_path)[weight], meant[weight]
    x = torch.randn(5, values.shape[1], generator=torch.Generator().manual_seed(1))
    half = values.shape[1] // 2

    for share in (slice(0, values.shape[1]), slice(half, 2 * half)):
        mine = stored.cut(1, share.start, share.stop)
        out = compiled.pack_linear(mine)(x[:, share].contiguous())

        expected = x[:, share] @ values[:, share].T
        assert mine.type == stored.type
        assert (out - expected).std() < 0.01 * expected.std()


@pytest.mark.parametrize("name", FORMS)
def test_ranks_hold_cuts_of_the_same_weight(name, tmp_path):
    """Also where the cut goes through a block of scales."""
    quantised(name, tmp_path)
    card = read_card(str(tmp_path))
    ops = bind("cpu", CPU, torch.float32, frozenset(), 16, forced={"linear": "reference"})
    whole = load_model(card, Build(ops)).layers[1]

    for size in (2, 4):
        ranks = [Build(ops, Groups.of(Group(rank, size, object()))) for rank in range(size)]
        cuts = [load_model(card, build).layers[1] for build in ranks]

        out = [layer.attention.out.weight.weight for layer in cuts]
        assert torch.equal(torch.cat(out, dim=1), whole.attention.out.weight.weight)
        gates = [layer.mlp.gate_up.weight.weight.chunk(2)[0] for layer in cuts]
        assert torch.equal(torch.cat(gates), whole.mlp.gate_up.weight.weight.chunk(2)[0])


def test_every_form_has_spellings_and_is_tried():
    assert list(quant.FORMS) == list(SPELLINGS)
    alone = {"mxfp4"}  # a form of experts only, tried in test_gpt_oss.py
    assert {name.split(",")[0].split(" ")[0] for name in FORMS} | alone == set(SPELLINGS)


def spoil(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


BROKEN = "model.layers.1.mlp.up_proj"
SCALES = {
    "fp8 in blocks": "weight_scale_inv",
    "fp8 by powers of two": "weight_scale_inv",
    "w4afp8": "weight_scale_inv",
    "gptq 4": "scales",
    "gptq 4, order of activations": "g_idx",
    "gptq 3": "qzeros",
    "awq": "scales",
    "compressed-tensors w4a16": "weight_scale",
    "compressed-tensors w4a16, zero points": "weight_zero_point",
    "compressed-tensors w8a8": "weight_scale",
    "compressed-tensors mxfp4": "weight_scale",
    "compressed-tensors nvfp4": "weight_scale",
    "w8a8_int8": "weight_scale",
    "modelslim, static": "quant_bias",
    "bitsandbytes nf4": "weight.absmax",
    "bitsandbytes int8": "SCB",
    "modelopt nvfp4": "weight_scale",
    "modelopt fp8 in blocks": "weight_scale",
    "modelopt mxfp8": "weight_scale",
    "auto-round, as gptq": "qzeros",
    "auto-round, as awq": "scales",
    "quark fp8 by output": "weight_scale",
    "quark int8": "weight_scale",
    "quark mxfp4": "weight_scale",
}
"""A part of each form that may be cut short or missing."""


@pytest.mark.parametrize("name", SCALES)
def test_a_part_that_is_cut_short_is_named(name, ops, tmp_path):
    quantised(name, tmp_path)
    part = f"{BROKEN}.{SCALES[name]}"

    def shorten(tensors):
        tensors[part] = tensors[part][:-1].contiguous()

    spoil(tmp_path, shorten)

    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.*(shape|scales)"):
        load(tmp_path, ops)


@pytest.mark.parametrize("name", SCALES)
def test_a_part_that_is_missing_is_named(name, ops, tmp_path):
    quantised(name, tmp_path)
    spoil(tmp_path, lambda tensors: tensors.pop(f"{BROKEN}.{SCALES[name]}"))

    if name == "compressed-tensors w4a16, zero points":  # then it has none
        return
    last = SCALES[name].rpartition(".")[2]
    with pytest.raises(ModelError, match=rf"layers\.1\.mlp\.up_proj.*lacks its {last}; it has"):
        load(tmp_path, ops)


@pytest.mark.parametrize(
    "name", [n for n, f in FORMS.items() if f.settings and f.settings["quant_method"] != "fp8"]
)
def test_numbers_without_a_description_are_no_weights(name, ops, tmp_path):
    quantised(name, tmp_path)
    rewrite_config(tmp_path, quantization_config=None)

    with pytest.raises(ModelError, match="lacks quantization_config|have no place in"):
        load(tmp_path, ops)


def group(**weights):
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("name", "settings", "error", "match"),
    [
        ("fp8 in blocks", {"quant_method": "magic"}, ConfigError, "unknown quantization .*'magic'"),
        ("fp8 in blocks", {"quant_method": None, "bits": 4}, ModelError, "quant_method must be"),
        ("fp8 in blocks", {"weight_block_size": [16]}, ModelError, "two whole numbers"),
        ("fp8 in blocks", {"activation_scheme": "x"}, ModelError, "dynamic or static"),
        ("fp8 in blocks", {"weight_block_size": [8, 8]}, ModelError, r"need \[16, 24\]"),
        ("gptq 4", {"bits": 5}, ModelError, "bits must be 2, 3, 4 or 8; got 5"),
        ("gptq 4", {"bits": None}, ModelError, "bits must be .*missing"),
        ("gptq 4", {"group_size": 0}, ModelError, "group_size must be -1 or positive"),
        ("gptq 4", {"group_size": 64}, ModelError, r"scales has shape \[6, .*\[3, .*needed"),
        ("gptq 4", {"checkpoint_format": "marlin"}, ModelError, "gptq or gptq_v2"),
        ("gptq 4", {"dynamic": {"(a+)+b": {}}}, ModelError, "may take too long"),
        ("gptq 4", {"dynamic": {"+:(": {}}}, ModelError, "no regular expression"),
        ("gptq 4", {"dynamic": {"+:.*up_proj": {"bits": 7}}}, ModelError, "2, 3, 4 or 8"),
        ("awq", {"version": "gemv"}, ModelError, "version must be gemm"),
        ("awq", {"bits": 8}, ModelError, "bits must be 4"),
        ("awq", {"zero_point": False}, ModelError, "zero_point must be true"),
        ("awq", {"group_size": 64}, ModelError, r"scales has shape \[6, .*\[3, .*needed"),
        ("compressed-tensors w8a8", {"format": "marlin-24"}, ModelError, "format must be one of"),
        ("compressed-tensors w8a8", {"config_groups": None}, ModelError, "config_groups must be"),
        ("compressed-tensors w8a8", {"ignore": [1]}, ModelError, "ignore must be a list"),
        ("compressed-tensors w8a8", {"ignore": ["re:(x*)*"]}, ModelError, "may take too long"),
        (
            "compressed-tensors w8a8",
            {"ignore": ["re:.*up_proj"]},
            ModelError,
            "up_proj.*has no group for it",
        ),
        (
            "compressed-tensors w8a8",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            ModelError,
            "sparsity_config must be empty",
        ),
        ("compressed-tensors w4a16", group(num_bits=16), ModelError, "num_bits must be in"),
        ("compressed-tensors w4a16", group(strategy="token"), ModelError, "strategy must be"),
        (
            "compressed-tensors w4a16",
            group(num_bits=4, strategy="group", group_size=64),
            ModelError,
            r"weight_scale has shape \[.*, 6\]; \[.*, 3\] is needed",
        ),
        ("bitsandbytes nf4", {"load_in_4bit": False}, ModelError, "load_in_4bit must be true"),
        (
            "modelopt fp8",
            {"quant_algo": "W4A8_AWQ"},
            ModelError,
            "quant_algo must be FP8 or FP8_PER",
        ),
        ("modelopt fp8", {"quant_algo": "MIXED_PRECISION"}, ModelError, "quantized_layers must be"),
        (
            "modelopt fp8",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A16"}}},
            ModelError,
            "quantized_layers, a: quant_algo must be FP8 or .*got 'W4A16'",
        ),
        (
            "auto-round, as gptq",
            {"packing_format": "auto_round:x"},
            ModelError,
            "one of auto_round",
        ),
        ("auto-round, as gptq", {"data_type": "mx_fp"}, ModelError, "data_type must be int"),
        ("auto-round, as gptq", {"bits": 5}, ModelError, "bits must be 2, 3, 4 or 8"),
        ("auto-round, as awq", {"bits": 8}, ModelError, "bits must be 4"),
        (
            "auto-round, as gptq",
            {"extra_config": {"(a+)+b": {"bits": 4}}},
            ModelError,
            "may take too long",
        ),
        ("auto-round, as gptq", {"extra_config": {"x": 1}}, ModelError, "x must be a mapping"),
        (
            "quark fp8",
            quark_settings({"dtype": "uint4", "qscheme": "per_group"}),
            ModelError,
            "dtype must be one of fp8_e4m3, int8, fp4; got 'uint4'",
        ),
        (
            "quark fp8",
            quark_settings({"dtype": "fp8_e4m3", "qscheme": "per_block"}),
            ModelError,
            "qscheme must be per_tensor or per_channel or per_group for fp8_e4m3",
        ),
        (
            "quark mxfp4",
            quark_settings({"dtype": "fp4", "qscheme": "per_group", "group_size": 16}),
            ModelError,
            "group_size must be 32 for fp4",
        ),
        (
            "quark mxfp4",
            quark_settings({"dtype": "int8", "qscheme": "per_channel"}),
            ModelError,
            "weight holds U8, not I8",
        ),
        ("quark fp8", {"global_quant_config": {}}, ModelError, "names no weight that is rounded"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(name, settings, error, match, ops, tmp_path):
    quantised(name, tmp_path)
    changed = FORMS[name].settings | settings
    changed = {key: value for key, value in changed.items() if value is not None}
    rewrite_config(tmp_path, quantization_config=changed)

    with pytest.raises(error, match=match):
        load(tmp_path, ops)


@pytest.mark.parametrize(
    ("described", "match"),
    [
        ({f"{BROKEN}.weight": "W4A4_DYNAMIC"}, "up_proj' is 'W4A4_DYNAMIC'; read are FLOAT, W8A8"),
        ({"version": "1"}, "names no tensor"),
        ({f"{BROKEN}.weight": "W8A8_DYNAMIC"}, "holds numbers of type I8|have no place"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(described, match, ops, tmp_path):
    quantised("modelslim, dynamic", tmp_path)
    (tmp_path / "quant_model_description.json").write_text(json.dumps(described))

    with pytest.raises(ModelError, match=match):
        load(tmp_path, ops)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"weight": lambda x: x[::2].contiguous()}, "two numbers of 4 bits in a byte"),
        ({"weight": lambda x: x * 2}, "not of 4 bits, from -8 to 7"),
        ({"weight_scale_second": lambda x: x.repeat(1, 7)}, "need .*, groups"),
        ({"weight_offset_second": lambda x: x + 1}, "only symmetric 4-bit weights"),
    ],
)
def test_four_bits_of_another_form_are_refused(changes, match):
    parts, _ = modelslim_four_bits(torch.linspace(-1, 1, 8 * 64).view(8, 64))
    parts |= {name: change(parts[name]) for name, change in changes.items()}
    stored = {
        name: RawTensor("I8", tuple(part.shape), part.contiguous().view(torch.uint8).flatten())
        if part.dtype == torch.int8
        else StoredWeight.from_tensor(part)
        for name, part in parts.items()
    }
    with pytest.raises(ModelError, match=match):
        ModelSlim({"m": "W4A8_DYNAMIC"}, "").restore("m", stored)


def test_a_description_beside_the_weights_of_modelopt_counts(ops, tmp_path):
    quantised("modelopt fp8", tmp_path)
    rewrite_config(tmp_path, quantization_config=None)
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))

    assert load(tmp_path, ops)


def test_modules_have_schemes_by_name_by_pattern_and_by_class(ops, paged, tmp_path):
    """As in mixed checkpoints; what is ignored, or described as float, stays as it is."""
    four, eight = FORMS["compressed-tensors w4a16"], FORMS["compressed-tensors w8a16"]
    reference = tiny("qwen2", tmp_path, **SIZES)
    path, meant = tmp_path / "model.safetensors", {}
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("_proj.weight") and ".o_proj." not in n]:
        form = eight if ".down_proj." in name or "layers.0.mlp.up" in name else four
        parts, meant[name] = form.change(tensors.pop(name))
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{last}": part.contiguous() for last, part in parts.items()}
    save_file(tensors, path)
    rewrite_config(
        tmp_path,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head", "re:.*o_proj$"],
            "config_groups": {
                "rest": {**four.settings["config_groups"]["group_0"], "format": "pack-quantized"},
                "eight": {
                    **eight.settings["config_groups"]["group_0"],
                    "targets": ["re:.*down_proj$", "model.layers.0.mlp.up_proj"],
                },
            },
        },
    )

    weights = restore(tmp_path)

    for name, values in meant.items():
        assert (weights[name].dense - values).abs().max() <= values.abs().max() * 2**-9
        is_eight = ".down_proj." in name or "layers.0.mlp.up" in name
        assert weights[name].type == ("Q8_0" if is_eight else "Q4_0")
    assert weights["model.layers.0.self_attn.o_proj.weight"].type == "F32"
    reference.load_state_dict(reference.state_dict() | meant)
    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])
    expected = reference(torch.tensor([PROMPT])).logits[0].detach()
    assert (logits - expected).std() < 0.01 * expected.std()


def test_gptq_modules_have_settings_of_their_own(tmp_path):
    """ "+:" changes settings of modules, "-:" leaves them as floats."""
    tiny("qwen2", tmp_path, **SIZES)
    path, meant = tmp_path / "model.safetensors", {}
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("_proj.weight") and ".o_proj." not in n]:
        form = FORMS["gptq 8" if ".down_proj." in name else "gptq 4"]
        parts, meant[name] = form.change(tensors.pop(name))
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{last}": part.contiguous() for last, part in parts.items()}
    save_file(tensors, path)
    own = {"-:.*o_proj": {}, "+:.*down_proj": {"bits": 8}}
    rewrite_config(tmp_path, quantization_config=FORMS["gptq 4"].settings | {"dynamic": own})

    weights = restore(tmp_path)

    for name, values in meant.items():
        assert (weights[name].dense - values).abs().max() <= values.abs().max() * 2**-9
        assert weights[name].type == ("Q8_0" if ".down_proj." in name else "Q4_0")


def test_modules_of_auto_round_and_of_mixed_modelopt_have_settings_of_their_own(tmp_path):
    for name, own, others, change in (
        (
            "auto-round, as gptq",
            "gptq 8",
            "gptq 4",
            {"extra_config": {r".*\.down_proj": {"bits": 8}, "lm_head": {"bits": 16}}},
        ),
        (
            "modelopt fp8",
            "modelopt nvfp4",
            "modelopt fp8",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
        ),
        (
            "quark fp8",
            "quark mxfp4",
            "quark fp8",
            {
                "layer_quant_config": {
                    "*down_proj": FORMS["quark mxfp4"].settings["global_quant_config"]
                }
            },
        ),
    ):
        folder = tmp_path / name
        tiny("qwen2", folder, **SIZES)
        path, meant = folder / "model.safetensors", {}
        tensors = load_file(path)
        for weight in [n for n in tensors if n.endswith("_proj.weight")]:
            form = FORMS[own if ".down_proj." in weight else others]
            parts, meant[weight] = form.change(tensors.pop(weight))
            stem = weight.removesuffix(".weight")
            tensors |= {f"{stem}.{last}": part.contiguous() for last, part in parts.items()}
        save_file(tensors, path)
        rewrite_config(folder, quantization_config=FORMS[name].settings | change)

        weights = restore(folder)

        for weight, values in meant.items():
            assert (weights[weight].dense - values).abs().max() <= values.abs().max() * 2**-8
            form = FORMS[own if ".down_proj." in weight else others]
            assert weights[weight].type == form.becomes


def test_a_bias_that_is_folded_into_integers_comes_back(ops, paged, tmp_path):
    reference, _ = quantised("modelslim, static", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("_proj.bias")]:
        stem = name.removesuffix(".bias")
        folded = (tensors.pop(name) / tensors[f"{stem}.deq_scale"]).round()
        tensors[f"{stem}.quant_bias"] = (tensors[f"{stem}.quant_bias"] + folded).int()
        units = folded * tensors[f"{stem}.deq_scale"]
        reference.load_state_dict(reference.state_dict() | {name: units})
    save_file(tensors, path)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    expected = reference(torch.tensor([PROMPT])).logits[0].detach()
    assert (logits - expected).std() < 0.01 * expected.std()


def test_zeros_for_a_bias_that_no_projection_has_are_needless(ops, tmp_path):
    """Some quantisers write a bias for every weight; one that is not zero has no place."""
    quantised("gptq 4", tmp_path)
    name = f"{BROKEN}.bias"
    spoil(tmp_path, lambda tensors: tensors.update({name: torch.zeros(192)}))
    assert load(tmp_path, ops)

    spoil(tmp_path, lambda tensors: tensors.update({name: torch.ones(192)}))
    with pytest.raises(ModelError, match=r"have no place in .*up_proj\.bias"):
        load(tmp_path, ops)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("gptq 4", ["form=gptq, 14 as Q4_0"]),
        ("gptq 4, order of activations", ["14 quantised weights are unpacked to bf16: .*desc_act"]),
        ("gptq 4, short groups", ["14 quantised weights are unpacked .*groups of 16 values"]),
        (
            "compressed-tensors w8a8",
            ["14 as Q8_0", "activations are not rounded as the checkpoint"],
        ),
        ("modelslim, static", ["activations are not rounded to 8 bits"]),
    ],
)
def test_what_is_done_otherwise_is_said_once(name, lines, ops, tmp_path, caplog):
    quantised(name, tmp_path)

    with caplog.at_level("INFO", logger="banyan"):
        load(tmp_path, ops)

    said = [record.getMessage() for record in caplog.records]
    for line in lines:
        assert len([text for text in said if re.search(line, text)]) == 1, said


def test_scales_for_the_cache_are_told_and_left_out(ops, tmp_path, caplog):
    quantised("compressed-tensors fp8", tmp_path)
    scales = [f"model.layers.{n}.self_attn.{kind}_scale" for n in (0, 1) for kind in "kv"]
    spoil(tmp_path, lambda tensors: tensors.update({n: torch.ones(1) for n in scales}))

    with caplog.at_level("INFO", logger="banyan"):
        load(tmp_path, ops)

    assert "4 scales for the KV cache are not used" in caplog.text


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_numbers_of_bitsandbytes_itself_mean_the_same(kind, nested, tmp_path):
    functional = pytest.importorskip("bitsandbytes").functional

    def change(weight):
        packed, state = functional.quantize_4bit(
            weight, quant_type=kind, blocksize=64, compress_statistics=nested
        )
        parts = {f"weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state)

    tiny("qwen2", tmp_path, **SIZES)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    meant = rewrite_weights(tmp_path, Form(change, settings, "BF16"))
    rewrite_config(tmp_path, quantization_config=settings)

    weights = restore(tmp_path)

    for name, values in meant.items():
        assert (weights[name].dense - values).abs().max() <= values.abs().max() * 2**-8


@pytest.mark.parametrize("block", [None, (128, 128), (3, 50), (1, 100)])
def test_a_tall_weight_in_fp8_is_what_its_scales_say(block):
    """Its rows are brought to floats a few at a time."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn((611, 200), generator=generator).to(torch.float8_e4m3fn)
    height, width = block or (1, 200)
    shape = (-(-611 // height), -(-200 // width))
    scale = torch.rand(shape, generator=generator) + 0.1
    spread = scale.repeat_interleave(height, 0)[:611].repeat_interleave(width, 1)[:, :200]
    parts = {
        "weight": RawTensor("F8_E4M3", (611, 200), numbers.view(torch.uint8).flatten()),
        "weight_scale_inv": StoredWeight.from_tensor(scale),
    }
    found = Fp8(block).restore("x", parts).weight
    assert found.type == "BF16" and torch.equal(found.dense, (numbers.float() * spread).bfloat16())


def test_numbers_in_fp8_stay_where_a_block_holds_them():
    """Blocks of 128 x 128 in 8 bits, other widths in bf16; nothing else of the model differs."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn((300, 256), generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand((3, 2), generator=generator) + 0.1
    parts = {
        "weight": RawTensor("F8_E4M3", (300, 256), numbers.view(torch.uint8).flatten()),
        "weight_scale_inv": StoredWeight.from_tensor(scale),
    }
    spread = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)
    kept = Fp8((128, 128)).restore("x", parts).weight
    assert kept.type == "E4M3" and torch.equal(kept.dense, numbers.float() * spread)
    by_tensor = parts | {"weight_scale_inv": StoredWeight.from_tensor(scale[:1, :1])}
    of_tensor = Fp8(None).restore("x", by_tensor).weight
    assert torch.equal(of_tensor.dense, numbers.float() * scale[0, 0])
    assert torch.equal(plain(kept).dense, kept.dense.bfloat16()) and plain(kept).type == "BF16"
    odd = parts | {"weight_scale_inv": StoredWeight.from_tensor(torch.ones(3, 3))}
    wide = Fp8((128, 100)).restore("x", odd)
    assert wide.weight.type == "BF16" and wide.unpacked.startswith("scales of 100 inputs are not")
    bad = numbers.view(torch.uint8).clone()
    bad[7, 7] = 0xFF  # no number
    holed = parts | {"weight": RawTensor("F8_E4M3", (300, 256), bad.flatten())}
    found = Fp8((128, 128)).restore("x", holed).weight
    assert found.type == "BF16" and bool(found.dense[7, 7].isnan())


@pytest.mark.parametrize(
    "name",
    [
        *("fp8 by output", "fp8 by tensor", "fp8 in blocks of 32", "modelopt mxfp8"),
        *("compressed-tensors fp8", "compressed-tensors fp8, groups", "modelopt fp8 in blocks"),
        *("modelopt fp8", "quark fp8 by output", "quark fp8 by group"),
    ],
)
def test_a_model_in_fp8_keeps_8_bits_and_gives_the_logits_of_these_weights(
    name, compiled, paged, tmp_path, monkeypatch
):
    """Also cut for two and three ranks; a row is the same alone and in a batch, bit for bit."""
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    monkeypatch.setitem(FORMS, "fp8 in blocks of 32", Form(by_block(32), settings, "E4M3"))
    reference, meant = quantised(name, tmp_path)
    stored = restore(tmp_path)
    assert {stored[weight].type for weight in meant} == {"E4M3"}

    exact = bind(
        "cpu", CPU, torch.float32, frozenset(), 16, exact=True, toolkit=open_toolkit("cpu", 1, {})
    )
    (logits,) = paged(load(tmp_path, exact)).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    down = "model.layers.1.mlp.down_proj.weight"
    whole, values = stored[down], meant[down]
    inputs = values.shape[1]
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(1))
    run = compiled.pack_linear(whole)
    together = run(x).clone()
    for row in range(5):
        assert torch.equal(run(x[row : row + 1])[0], together[row])
    for ranks in (2, 3):
        wide = inputs // ranks
        total = torch.zeros_like(together)
        for first in range(0, inputs, wide):
            mine = whole.cut(1, first, first + wide)
            assert mine.type == "E4M3"
            total += compiled.pack_linear(mine)(x[:, first : first + wide].contiguous())
        torch.testing.assert_close(total, x @ values.T, atol=1e-4, rtol=1e-4)


def test_stacks_of_experts_in_fp8_keep_8_bits(compiled, paged, tmp_path):
    """A tensor holds all of a layer, and so does another one of their scales; other devices get
    the same numbers in bf16."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "share_expert_dim": 32}
    for folder in ("numbers", "meant"):
        tiny("step 3.7", tmp_path / folder, **sizes)
    tensors = load_file(tmp_path / "numbers" / "model.safetensors")
    meant = dict(tensors)
    stacks = [name for name in tensors if ".moe." in name and name.endswith("_proj.weight")]
    assert len(stacks) == 9
    for name in stacks:
        each = [by_block(32)(expert) for expert in tensors[name]]
        tensors[name] = torch.stack([parts["weight"] for parts, _ in each])
        scale = name.replace(".weight", ".weight_scale_inv")
        tensors[scale] = torch.stack([parts["weight_scale_inv"] for parts, _ in each])
        meant[name] = torch.stack([values for _, values in each])
    save_file(tensors, tmp_path / "numbers" / "model.safetensors")
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    rewrite_config(tmp_path / "numbers", quantization_config=settings)
    card = read_card(str(tmp_path / "numbers"))

    kept = dict(tensors_of(card, ops=compiled))

    for name in stacks:
        assert kept[name].type == "E4M3" and torch.equal(kept[name].dense, meant[name])
    elsewhere = dict(tensors_of(card))
    assert torch.equal(elsewhere[stacks[0]].dense, meant[stacks[0]].bfloat16())
    (logits,) = paged(load(tmp_path / "numbers", compiled)).step([(0, PROMPT)])
    (expected,) = paged(load(tmp_path / "meant", compiled)).step([(0, PROMPT)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    tensors[scale] = tensors[scale][:-1].contiguous()
    save_file(tensors, tmp_path / "numbers" / "model.safetensors")
    with pytest.raises(ModelError, match=r"scales of shape \[4, .* for 5 experts"):
        load(tmp_path / "numbers", compiled)
