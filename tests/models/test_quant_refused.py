"""Quantised checkpoints with parts that are missing, cut short, or not what is described."""

import json

import pytest
import torch

from banyan.base.errors import ConfigError, ModelError
from banyan.models.weights.quant.modelslim import ModelSlim
from banyan.ops.stored import RawTensor, StoredWeight
from tests.models.families import rewrite_config
from tests.models.quantised import FORMS, modelslim_four_bits, modelslim_packed, quark_settings
from tests.models.quantised_checkpoints import BROKEN, quantised, spoil
from tests.support.logits import load

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
        load(tmp_path, ops)
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
        ({"weight": lambda x: x[::4].contiguous()}, "weight_scale_second has shape"),
        ({"weight": lambda x: x * 2}, "not of 4 bits, from -8 to 7"),
        ({"weight_scale_second": lambda x: x.repeat(1, 7)}, "need .*, groups"),
        ({"weight_offset_second": lambda x: x + 1}, "only symmetric 4-bit weights"),
    ],
)
def test_four_bits_of_another_form_are_refused(changes, match):
    parts, _ = modelslim_four_bits(torch.linspace(-1, 1, 8 * 64).view(8, 64))
    refuse_four_bits(parts, changes, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scale_bias": lambda x: x * 1.1}, "scale_bias is not 8 times the sums"),
        ({"weight": lambda x: (x << 4) | ((x >> 4) & 15)}, "bytes hold two outputs in another"),
        ({"weight": lambda x: x[:3].contiguous()}, "weight_scale has 8 numbers"),
    ],
    ids=["sums", "the other half first", "rows"],
)
def test_two_numbers_in_a_byte_that_do_not_fit_are_refused(changes, match):
    parts, _ = modelslim_packed(torch.linspace(-1, 1.5, 8 * 64).view(8, 64))
    refuse_four_bits(parts, changes, match)


def refuse_four_bits(parts, changes, match):
    parts |= {name: change(parts[name]) for name, change in changes.items()}
    stored = {
        name: RawTensor("I8", tuple(part.shape), part.contiguous().view(torch.uint8).flatten())
        if part.dtype == torch.int8
        else StoredWeight.from_tensor(part)
        for name, part in parts.items()
    }
    with pytest.raises(ModelError, match=match):
        ModelSlim({"m": "W4A8_DYNAMIC"}, "").restore("m", stored)
