"""Quantised checkpoints: what the tensors of a format mean together, and what cannot be."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.formats.gguf import kept_bytes
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.quantization import SPELLINGS
from banyan.models.weights import quant
from banyan.models.weights.loader import load_model
from banyan.models.weights.quant.sizes import kept_size_of_folder
from banyan.ops.bind import bind
from banyan.parallel.groups import Group, Groups
from tests.models.families import rewrite_config, tiny
from tests.models.quantised import FORMS, Form
from tests.models.quantised_checkpoints import (
    BROKEN,
    SIZES,
    quantised,
    restore,
    rewrite_weights,
    spoil,
)
from tests.support.logits import PROMPT, load

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_that_are_meant_in_few_bits(name, tmp_path):
    _, meant = quantised(name, tmp_path)

    weights = restore(tmp_path)

    for weight, values in meant.items():
        error = (weights[weight].dense.float() - values).abs().max()
        assert error <= values.abs().max() * 2**-8
        assert weights[weight].type in FORMS[name].becomes.split(" or ")
    assert weights["model.norm.weight"].type == "F32"
    model_config = read_model_config(str(tmp_path))
    kept = [kept_bytes(w.type, w.shape) or w.raw.numel() for w in weights.values()]
    assert kept_size_of_folder(model_config, keeps_fp8=True, keeps_fp4=True) == sum(kept)
    wide = [
        2 * w.dense.numel() if w.type in ("E4M3", "NVFP4") else n
        for n, w in zip(kept, weights.values(), strict=True)
    ]
    assert kept_size_of_folder(model_config, keeps_fp8=False) == sum(wide)


@pytest.mark.parametrize("name", FORMS)
def test_logits_equal_those_of_the_weights_that_are_meant(name, ops, paged, tmp_path):
    reference, _ = quantised(name, tmp_path)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits - expected).std() < 0.01 * expected.std()


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
    model_config = read_model_config(str(tmp_path))
    ops = bind("cpu", CPU, torch.float32, frozenset(), 16, forced={"linear": "reference"})
    whole = load_model(model_config, Build(ops)).layers[1]

    for size in (2, 4):
        ranks = [Build(ops, Groups.of(Group(rank, size, object()))) for rank in range(size)]
        cuts = [load_model(model_config, build).layers[1] for build in ranks]

        out = [layer.attention.out.weight.weight for layer in cuts]
        assert torch.equal(torch.cat(out, dim=1), whole.attention.out.weight.weight)
        gates = [layer.mlp.gate_up.weight.weight.chunk(2)[0] for layer in cuts]
        assert torch.equal(torch.cat(gates), whole.mlp.gate_up.weight.weight.chunk(2)[0])


def test_every_form_has_spellings_and_is_tried():
    assert list(quant.FORMS) == list(SPELLINGS)
    alone = {"mxfp4"}  # a form of experts only, tried in test_gpt_oss.py
    assert {name.split(",")[0].split(" ")[0] for name in FORMS} | alone == set(SPELLINGS)


def test_a_description_next_to_the_weights_of_modelopt_counts(ops, tmp_path):
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


def test_scales_for_the_cache_are_reported_and_left_out(ops, tmp_path, caplog):
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
