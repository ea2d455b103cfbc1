"""Checkpoints of random weights as safetensors, dense and of any size: to measure, not to talk to.

python -m benchmarks.random_floats FORM FOLDER [LAYERS] [WIDTH] [VOCAB]
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

FORMS = ("bf16", "fp8", "fp8-block", "fp8-tensor", "int8", "w4a16")
HEAD_DIM, BLOCK = 64, 128
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INTS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}
FOURS = INTS | {"num_bits": 4, "strategy": "group", "group_size": BLOCK}
SETTINGS = {
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**INTS, "type": "float"}},
        },
    },
    "fp8-block": {**_FP8, "weight_block_size": [BLOCK, BLOCK]},
    "fp8-tensor": _FP8,
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": INTS}},
    },
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": FOURS}},
    },
}


def write(form: str, folder: str, layers: int, width: int = 1024, vocab: int = 4096) -> int:
    """A model in the form of Llama in one file; returns the bytes of its weights."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    inner, heads = width * 11 // 4 // BLOCK * BLOCK, width // HEAD_DIM
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if form in SETTINGS:
        config["quantization_config"] = SETTINGS[form]
    Path(folder, "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    shapes |= {"mlp.down_proj": (width, inner)}
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": _floats(vocab, width),
        "lm_head.weight": _floats(vocab, width),
        "model.norm.weight": torch.ones(width, dtype=torch.bfloat16),
    }
    for stem in (f"model.layers.{layer}" for layer in range(layers)):
        for name, shape in shapes.items():
            tensors |= {f"{stem}.{name}.{k}": v for k, v in _weight(form, *shape).items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(tensors, str(Path(folder, "model.safetensors")))
    return sum(tensor.nbytes for tensor in tensors.values())


def _floats(*shape: int) -> Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).bfloat16()


def _weight(form: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    """The tensors of one projection, such that a product keeps its size."""
    if form == "bf16":
        return {"weight": _floats(outputs, inputs)}
    scale = inputs**-0.5
    if form == "fp8":
        numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": torch.full((outputs, 1), scale).bfloat16()}
    if form in ("fp8-block", "fp8-tensor"):
        numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        if form == "fp8-tensor":
            return {"weight": numbers, "weight_scale": torch.full((1,), scale)}
        blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
        return {"weight": numbers, "weight_scale_inv": torch.full(blocks, scale)}
    if form == "w4a16":
        words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), dtype=torch.int32)
        factors = torch.full((outputs, inputs // BLOCK), scale / 4.6).bfloat16()
        whole = torch.tensor([outputs, inputs])
        return {"weight_packed": words, "weight_scale": factors, "weight_shape": whole}
    numbers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return {"weight": numbers, "weight_scale": torch.full((outputs, 1), scale / 74).bfloat16()}


if __name__ == "__main__":
    form, folder, *sizes = sys.argv[1:]
    print(f"{write(form, folder, *map(int, sizes or ['16'])):,} bytes")
