"""Quantised checkpoints: what the tensors of a format mean together, and what cannot be."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ConfigError, ModelError
from banyan.config.checkpoint import read_card
from banyan.layers.build import Build
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.parallel.groups import Group, Groups
from tests.models.families import rewrite_config, tiny
from tests.models.test_families import PROMPT, load

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def rewrite_weights(folder: Path, change) -> dict[str, torch.Tensor]:
    """Replace each projection's weight by what `change` makes of it, (tensors by last part, the
    weight they mean); returns the meant weights by name."""
    path = folder / "model.safetensors"
    tensors, meant = {}, {}
    for name, tensor in load_file(path).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        parts, meant[name] = change(tensor)
        tensors |= {f"{stem}.{last}": part.contiguous() for last, part in parts.items()}
    save_file(tensors, path)
    return meant


def by_block(block: int):
    def change(weight):
        rows, columns = (-(-size // block) for size in weight.shape)
        padded = torch.zeros(rows * block, columns * block)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        tiles = padded.view(rows, block, columns, block)
        scale = tiles.abs().amax((1, 3)).clamp(min=1e-6) / 448
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        spread = spread[: weight.shape[0], : weight.shape[1]]
        numbers = (weight / spread).to(FP8)
        return {"weight": numbers, "weight_scale_inv": scale}, numbers.float() * spread

    return change


def by_output(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(FP8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def by_tensor(weight):
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(FP8)
    parts = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return parts, numbers.float() * scale


FORMATS = {
    "fp8 in blocks": (by_block(16), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "fp8 by output": (by_output, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 by tensor": (by_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
}


def quantised(name: str, folder: Path, variant: str = "qwen2"):
    """A quantised checkpoint, and the transformers model of the weights that it means."""
    change, settings = FORMATS[name]
    reference = tiny(variant, folder)
    meant = rewrite_weights(folder, change)
    rewrite_config(folder, quantization_config=settings)
    state = reference.state_dict()
    state |= {name: weight for name, weight in meant.items() if name in state}
    reference.load_state_dict(state)
    return reference


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_weights_that_are_meant(name, ops, paged, tmp_path):
    reference = quantised(name, tmp_path)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert (logits - expected).std() < 0.01 * expected.std()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_hold_cuts_of_the_same_weight(name, size, tmp_path):
    """Also where the cut goes through a block of scales."""
    quantised(name, tmp_path, "qwen2, eight heads")
    card = read_card(str(tmp_path))
    ops = bind("cpu", CPU, torch.float32, frozenset(), 16, forced={"linear": "reference"})
    whole = load_model(card, Build(ops)).layers[1]

    ranks = [Build(ops, Groups.of(Group(rank, size, object()))) for rank in range(size)]
    cuts = [load_model(card, build).layers[1] for build in ranks]

    out = [layer.attention.out.weight.weight for layer in cuts]
    assert torch.equal(torch.cat(out, dim=1), whole.attention.out.weight.weight)
    gates = [layer.mlp.gate_up.weight.weight.chunk(2)[0] for layer in cuts]
    assert torch.equal(torch.cat(gates), whole.mlp.gate_up.weight.weight.chunk(2)[0])


def spoil(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def no_scale(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]


def short_scale(tensors):
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors[name] = tensors[name][:-1].contiguous()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (no_scale, r"1 quantised weights lack some.*layers\.1\.mlp\.up_proj"),
        (short_scale, r"up_proj.*scales of shape .*need \[5, 3\]"),
    ],
)
def test_a_scale_that_is_missing_or_cut_short_is_named(change, match, ops, tmp_path):
    quantised("fp8 in blocks", tmp_path)
    spoil(tmp_path, change)

    with pytest.raises(ModelError, match=match):
        load(tmp_path, ops)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"quant_method": "magic"}, ConfigError, "unknown quantization of a checkpoint 'magic'"),
        ({"bits": 4}, ModelError, "quant_method must be a text; it is missing"),
        ({"quant_method": "fp8", "weight_block_size": [16]}, ModelError, "two whole numbers"),
        ({"quant_method": "fp8", "activation_scheme": "x"}, ModelError, "dynamic or static"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8]}, ModelError, r"need \[6, 10\]"),
        (None, ModelError, "type F8_E4M3, which are no weights by themselves"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(settings, error, match, ops, tmp_path):
    quantised("fp8 in blocks", tmp_path)
    rewrite_config(tmp_path, quantization_config=settings)

    with pytest.raises(error, match=match):
        load(tmp_path, ops)
