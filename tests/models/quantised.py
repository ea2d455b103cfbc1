"""Quantised weights of every form, made by its own definition or tool, and what they mean."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

FP8 = torch.float8_e4m3fn
Change = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""From a weight to (tensors by last part of their names, the weight that they mean)."""


@dataclass(frozen=True)
class Form:
    """
    Attributes:
        settings: the checkpoint's quantization_config; None = another file describes it.
        becomes: storage type of the restored weight.
    """

    change: Change
    settings: dict | None
    becomes: str
    files: dict[str, Callable[[list[str]], dict]] = field(default_factory=dict)


def by_block(block: int) -> Change:
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


def fp8_by_output(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(FP8)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def fp8_by_group(weight, group: int = 32):
    pieces = weight.unflatten(1, (-1, group))
    scale = pieces.abs().amax(2) / 448
    numbers = (pieces / scale[..., None]).to(FP8)
    meant = (numbers.float() * scale[..., None]).flatten(1)
    return {"weight": numbers.flatten(1), "weight_scale": scale}, meant


def fp8_by_tensor(weight):
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(FP8)
    parts = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return parts, numbers.float() * scale


def fp8_by_powers(weight):
    parts, meant = modelopt_mxfp8(weight)
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, meant


def w4afp8(weight, group: int = 32):
    pieces = weight.unflatten(1, (-1, group))
    scale = (pieces.abs().amax(2) / 7).bfloat16()
    levels = (pieces / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8)
    low, high = levels.flatten(1).unflatten(1, (-1, 2)).unbind(2)
    meant = (levels.float() * scale.float()[..., None]).flatten(1)
    parts = {"weight": high << 4 | low & 15, "weight_scale_inv": scale}
    return parts | {"input_scale": torch.ones(1)}, meant


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool):
    """numbers [out, in] from zero up, zero and scale [out, groups], what they mean [out, in]."""
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    pieces = weight.view(outputs, -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = pieces.abs().amax(-1) / (1 << (bits - 1))
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = pieces.amin(-1).clamp(max=0), pieces.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round()
    scale = scale.half().float()
    spread = [t.repeat_interleave(group, 1) for t in (zero, scale)]
    numbers = (weight / spread[1] + spread[0]).round().clamp(0, top)
    return numbers.int(), zero.int(), scale, (numbers - spread[0]) * spread[1]


def packed(numbers: Tensor, bits: int) -> Tensor:
    """A stream of bits along the last dimension, cut into 32-bit words from the lowest up."""
    wide = numbers.numpy().astype(np.uint32)
    stream = (wide[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    stream = stream.reshape(*wide.shape[:-1], -1, 32)
    return torch.from_numpy(
        (stream << np.arange(32, dtype=np.uint32)).sum(-1).astype(np.uint32).view(np.int32)
    )


def gptq(
    bits: int, group: int, symmetric: bool = True, shift: int = 1, order: bool = False
) -> Change:
    def change(weight):
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        index = torch.arange(inputs) // size
        if order:
            places = torch.randperm(inputs, generator=torch.Generator().manual_seed(3))
            index = index[places]
        back = index.argsort(stable=True)  # groups in order
        numbers, zero, scale, meant = rounded(weight[:, back], bits, group, symmetric)
        forth = back.argsort()
        parts = {
            "qweight": packed(numbers[:, forth].contiguous(), bits).T,
            "qzeros": packed((zero.T - shift) & ((1 << bits) - 1), bits),
            "scales": scale.T.half(),
            "g_idx": index.int(),
        }
        return parts, meant[:, forth]

    return change


def gptq_settings(bits: int, group: int, **more) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


def awq(group: int) -> Change:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers):  # [rows, out]
        return packed(numbers.view(len(numbers), -1, 8)[..., order].flatten(1), 4)

    def change(weight):
        numbers, zero, scale, meant = rounded(weight, 4, group, False)
        parts = {
            "qweight": words(numbers.T.contiguous()),
            "qzeros": words(zero.T.contiguous()),
            "scales": scale.T.half(),
        }
        return parts, meant

    return change


def llm_compressor(format: str, args: dict, activations: dict | None = None) -> Form:
    """By the tool itself."""
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations}
    scheme = QuantizationScheme(**group)
    compressor = BaseCompressor.get_value_from_registry(format)
    bits, is_float = args["num_bits"], args.get("type") == "float"

    def change(weight):
        strategy = args["strategy"]
        size = args.get("group_size") or (
            weight.numel() if strategy == "tensor" else weight.shape[1]
        )
        pieces = (
            weight.reshape(1, -1, size)
            if strategy == "tensor"
            else weight.view(len(weight), -1, size)
        )
        state = {"weight": weight}
        if args.get("symmetric", True):
            top = (448.0 if bits == 8 else 6.0) if is_float else float((1 << (bits - 1)) - 1)
            scale = pieces.abs().amax(-1) / top
        else:
            low, high = pieces.amin(-1).clamp(max=0), pieces.amax(-1).clamp(min=0)
            scale = (high - low) / ((1 << bits) - 1)
            zero = (-low / scale).round() - (1 << (bits - 1))
            state["weight_zero_point"] = zero.to(torch.int8)
        if format.startswith("mxfp4"):
            scale = torch.exp2(scale.log2().ceil())
        if format.startswith("nvfp4"):
            state["weight_global_scale"] = (448.0 / scale.max()).reshape(1)
            scale = (scale * state["weight_global_scale"]).to(FP8).float()
        state["weight_scale"] = scale
        parts = compressor.compress(state, scheme)
        meant = compressor.decompress(dict(parts), scheme)["weight"].float()
        return parts, meant

    settings = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return Form(change, settings, "")


def compressed(becomes: str, format: str, activations: dict | None = None, **args) -> Form:
    form = llm_compressor(format, args, activations)
    return Form(form.change, form.settings, becomes)


def int8_by_output(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scale).round()
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale


def modelslim(weight):
    parts, meant = int8_by_output(weight)
    return {**parts, "weight_offset": torch.zeros_like(parts["weight_scale"])}, meant


def modelslim_four_bits(weight, group: int = 32):
    """Numbers of 4 bits in bytes, with a scale by output and one by group."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / 7
    parts = wide.unflatten(1, (-1, group))
    second = (parts.abs().amax(-1) / (7 * scale)).half().float()
    unit = (scale * second).half().float().unsqueeze(-1)
    numbers = (parts / unit).nan_to_num().round().clamp(-8, 7)
    return {
        "weight": numbers.flatten(1).to(torch.int8),
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
        "weight_scale_second": second,
        "weight_offset_second": torch.zeros_like(second),
    }, (numbers * unit).flatten(1)


def modelslim_packed(weight):
    """Numbers of 4 bits, those of two outputs in a byte, with a scale by output; what modelslim
    has worked out for one operator lies beside them, as several sums."""
    wide = weight.float()
    scale = (wide.abs().amax(1, keepdim=True) / 7).half().float()
    numbers = (wide / scale).nan_to_num().round().clamp(-8, 7)
    low, high = numbers.to(torch.int8).unflatten(0, (-1, 2)).unbind(1)
    return {
        "weight": (low & 15) | (high << 4),
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
        "scale_bias": (8 * (numbers * scale).unflatten(1, (2, -1)).sum(-1)),
    }, numbers * scale


def modelslim_static(weight):
    """The layer's bias, here zero, is in quant_bias, and what takes the offset away again."""
    parts, meant = modelslim(weight)
    unit, offset = torch.tensor([0.02]), torch.tensor([3.0])
    folded = -offset * parts["weight"].int().sum(1)
    return {
        **parts,
        "input_scale": unit,
        "input_offset": offset,
        "quant_bias": folded.int(),
        "deq_scale": unit * parts["weight_scale"].flatten(),
    }, meant


def description(scheme: str) -> dict[str, Callable[[list[str]], dict]]:
    def describe(names):
        quantised = {name.rpartition(".")[0] for name in names if name.endswith(".weight_scale")}
        return {"model_quant_type": scheme, "version": "1.0.0"} | {
            name: scheme if name.rpartition(".")[0] in quantised else "FLOAT" for name in names
        }

    return {"quant_model_description.json": describe}


def four_bit_table(block: int, nested: bool, kind: str = "nf4") -> Change:
    """bitsandbytes: the largest number of each block times a level of a table."""
    table = torch.linspace(-1, 1, 16) ** 3 if kind == "nf4" else torch.linspace(-1, 1, 16)
    dynamic = torch.linspace(-1, 1, 256)

    def change(weight):
        largest = weight.flatten().view(-1, block).abs().amax(1)
        state = {"quant_type": kind, "blocksize": block, "dtype": "float32"}
        state |= {"shape": list(weight.shape)}
        parts = {"weight.quant_map": table}
        if nested:
            mean, size = largest.mean(), 16
            outer = (largest - mean).view(-1, size).abs().amax(1)
            share = (largest - mean) / outer.repeat_interleave(size)
            inner = (share.unsqueeze(1) - dynamic).abs().argmin(1)
            largest = dynamic[inner] * outer.repeat_interleave(size) + mean
            state |= {"nested_blocksize": size, "nested_offset": float(mean)}
            parts |= {"weight.absmax": inner.byte(), "weight.nested_absmax": outer}
            parts |= {"weight.nested_quant_map": dynamic}
        else:
            parts["weight.absmax"] = largest
        share = weight.flatten() / largest.repeat_interleave(block)
        chosen = (share.unsqueeze(1) - table).abs().argmin(1).byte()
        parts["weight"] = ((chosen[::2] << 4) | chosen[1::2]).view(-1, 1)
        raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = raw
        meant = table[chosen.long()] * largest.repeat_interleave(block)
        return parts, meant.view(weight.shape)

    return change


def llm_int8(weight):
    largest = weight.abs().amax(1)
    numbers = (weight / largest.unsqueeze(1) * 127).round()
    parts = {"weight": numbers.to(torch.int8), "SCB": largest}
    parts["weight_format"] = torch.zeros((), dtype=torch.uint8)
    return parts, numbers * largest.unsqueeze(1) / 127


def modelopt_fp4(weight):
    parts, meant = FORMS["compressed-tensors nvfp4"].change(weight)
    return {
        "weight": parts["weight_packed"],
        "weight_scale": parts["weight_scale"],
        "weight_scale_2": 1 / parts["weight_global_scale"][0],
        "input_scale": torch.tensor(0.1),
    }, meant


def modelopt_blocks(weight):
    parts, meant = by_block(128)(weight)
    scale = parts["weight_scale_inv"][:, None, :, None]
    return {"weight": parts["weight"], "weight_scale": scale}, meant


def modelopt_mxfp8(weight):
    groups = weight.view(len(weight), -1, 32)
    exponents = (groups.abs().amax(2) / 448).log2().ceil()
    numbers = (groups / exponents.exp2().unsqueeze(2)).to(FP8)
    meant = (numbers.float() * exponents.exp2().unsqueeze(2)).view(weight.shape)
    scale = (exponents + 127).to(torch.uint8)
    return {"weight": numbers.view(weight.shape), "weight_scale": scale}, meant


def flat_scale(change: Change) -> Change:
    """One number per output, as a vector."""

    def changed(weight):
        parts, meant = change(weight)
        return {**parts, "weight_scale": parts["weight_scale"].flatten()}, meant

    return changed


def quark_fp4(weight):
    parts, meant = FORMS["compressed-tensors mxfp4"].change(weight)
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, meant


def quark_settings(weight: dict, **more) -> dict:
    """As quark writes it beside what it exports."""
    whole = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "global_quant_config": whole,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
        **more,
    }


def auto_round_settings(bits: int, group: int, packing: str, **more) -> dict:
    return {
        "quant_method": "auto-round",
        **{"bits": bits, "group_size": group, "sym": True, "data_type": "int"},
        **{"autoround_version": "0.5.1", "packing_format": f"auto_round:{packing}"},
        **more,
    }


_INT8 = {"num_bits": 8, "strategy": "channel"}
_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_4BIT = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FORMS = {
    "fp8 in blocks": Form(
        by_block(16), {"quant_method": "fp8", "weight_block_size": [16, 16]}, "BF16"
    ),
    "fp8 by output": Form(
        fp8_by_output, {"quant_method": "fp8", "activation_scheme": "dynamic"}, "E4M3"
    ),
    "fp8 by tensor": Form(
        fp8_by_tensor, {"quant_method": "fp8", "activation_scheme": "static"}, "E4M3"
    ),
    "fp8 by powers of two": Form(fp8_by_powers, {"quant_method": "mxfp8"}, "E4M3"),
    "w4afp8": Form(w4afp8, {"quant_method": "w4afp8", "group_size": 32}, "Q4_0"),
    "w4afp8, fp8 in blocks": Form(by_block(128), {"quant_method": "w4afp8"}, "E4M3"),
    "gptq 4": Form(gptq(4, 32), gptq_settings(4, 32, sym=True, desc_act=False), "Q4_0"),
    "gptq 4, all inputs": Form(gptq(4, -1), gptq_settings(4, -1), "Q4_0"),
    "gptq 4, zero points": Form(gptq(4, 64, False), gptq_settings(4, 64, sym=False), "Q4_1"),
    "gptq 4, second layout": Form(
        gptq(4, 32, False, shift=0), gptq_settings(4, 32, checkpoint_format="gptq_v2"), "Q4_1"
    ),
    "gptq 4, order of activations": Form(
        gptq(4, 32, order=True), gptq_settings(4, 32, desc_act=True), "BF16"
    ),
    "gptq 4, short groups": Form(gptq(4, 16), gptq_settings(4, 16), "BF16"),
    "gptq 2": Form(gptq(2, 32, False), gptq_settings(2, 32), "Q4_0"),
    "gptq 3": Form(gptq(3, 64), gptq_settings(3, 64), "Q4_0"),
    "gptq 8": Form(gptq(8, 32), gptq_settings(8, 32), "Q8_0"),
    "gptq 8, zero points": Form(gptq(8, 32, False), gptq_settings(8, 32), "Q8_0 or BF16"),
    "gptq marlin": Form(
        gptq(4, 32), gptq_settings(4, 32) | {"quant_method": "gptq_marlin"}, "Q4_0"
    ),
    "awq": Form(
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        "Q4_1",
    ),
    "awq, older keys": Form(
        awq(64), {"quant_method": "awq_marlin", "w_bit": 4, "q_group_size": 64}, "Q4_1"
    ),
    "compressed-tensors w8a8": compressed("Q8_0", "int-quantized", _TOKEN, **_INT8),
    "compressed-tensors w8a8, one scale": compressed(
        "Q8_0", "int-quantized", _TOKEN, num_bits=8, strategy="tensor"
    ),
    "compressed-tensors w4a16": compressed(
        "Q4_0", "pack-quantized", num_bits=4, strategy="group", group_size=32
    ),
    "compressed-tensors w4a16, zero points": compressed(
        "Q4_1", "pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False
    ),
    "compressed-tensors w8a16": compressed(
        "Q8_0", "pack-quantized", num_bits=8, strategy="channel"
    ),
    "compressed-tensors fp8": compressed(
        "E4M3", "float-quantized", {**_TOKEN, "type": "float"}, **_INT8, type="float"
    ),
    "compressed-tensors fp8, groups": compressed(
        *("E4M3", "float-quantized", {**_TOKEN, "type": "float"}),
        **{"num_bits": 8, "strategy": "group", "group_size": 64, "type": "float"},
    ),
    "compressed-tensors mxfp4": compressed(
        "MXFP4",
        "mxfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype="torch.uint8",
        zp_dtype="torch.uint8",
    ),
    "compressed-tensors nvfp4": compressed(
        "NVFP4",
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype="torch.float8_e4m3fn",
        zp_dtype="torch.float8_e4m3fn",
    ),
    "w8a8_int8": Form(int8_by_output, {"quant_method": "w8a8_int8"}, "Q8_0"),
    "modelslim, dynamic": Form(modelslim, None, "Q8_0", description("W8A8_DYNAMIC")),
    "modelslim, four bits": Form(modelslim_four_bits, None, "Q4_0", description("W4A8_DYNAMIC")),
    "modelslim, packed": Form(modelslim_packed, None, "Q4_0", description("W4A8_DYNAMIC")),
    "modelslim, static": Form(modelslim_static, None, "Q8_0", description("W8A8")),
    "bitsandbytes nf4": Form(four_bit_table(64, nested=False), _4BIT, "BF16"),
    "bitsandbytes nf4, nested": Form(four_bit_table(64, nested=True), _4BIT, "BF16"),
    "bitsandbytes fp4": Form(four_bit_table(32, nested=False, kind="fp4"), _4BIT, "BF16"),
    "bitsandbytes int8": Form(
        llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "Q8_0"
    ),
    "modelopt fp8": Form(fp8_by_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}, "E4M3"),
    "modelopt nvfp4": Form(
        modelopt_fp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"
    ),
    "modelopt fp8 by output": Form(
        flat_scale(fp8_by_output),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "E4M3",
    ),
    "modelopt fp8 in blocks": Form(
        modelopt_blocks, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "E4M3"
    ),
    "modelopt mxfp8": Form(
        modelopt_mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "E4M3"
    ),
    "auto-round, as gptq": Form(gptq(4, 32), auto_round_settings(4, 32, "auto_gptq"), "Q4_0"),
    "auto-round, as gptq, zero points": Form(
        gptq(4, 64, False), auto_round_settings(4, 64, "auto_gptq", sym=False), "Q4_1"
    ),
    "auto-round, as gptq, 8 bits": Form(
        gptq(8, 32), auto_round_settings(8, 32, "auto_gptq"), "Q8_0"
    ),
    "auto-round, as awq": Form(awq(32), auto_round_settings(4, 32, "auto_awq", sym=False), "Q4_1"),
    "auto-round, older keys": Form(
        gptq(4, 32),
        {
            **{"quant_method": "intel/auto-round", "backend": "auto_round:gptq"},
            **{"bits": 4, "group_size": 32, "sym": True, "data_type": "int"},
        },
        "Q4_0",
    ),
    "quark fp8": Form(
        fp8_by_tensor, quark_settings({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}), "E4M3"
    ),
    "quark fp8 by output": Form(
        flat_scale(fp8_by_output),
        quark_settings({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}),
        "E4M3",
    ),
    "quark fp8 by group": Form(
        fp8_by_group,
        quark_settings({"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32}),
        "E4M3",
    ),
    "quark int8": Form(
        flat_scale(int8_by_output),
        quark_settings({"dtype": "int8", "qscheme": "per_channel", "symmetric": True}),
        "Q8_0",
    ),
    "quark mxfp4": Form(
        quark_fp4,
        quark_settings(
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
        ),
        "MXFP4",
    ),
}
