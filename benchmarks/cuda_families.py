"""Checks models of experts and of latent attention on a CUDA device, end to end:
python -m benchmarks.cuda_families [--speed]

Greedy tokens of tiny random float32 models against transformers, captured and eager, and of rounded
experts against a CPU; with --speed also decode steps of a few layers of the shape of Qwen3-30B-A3B,
random bfloat16 weights, and the share of the time that reading the active experts must take. Needs
no network. With --device cpu --small it tries the script itself.
"""

import argparse
import tempfile
from typing import TYPE_CHECKING

import torch

import banyan
from benchmarks.cuda_check import (
    copied_bytes_per_second,
    generate,
    greedy,
    prompts_of,
    random_engine,
    step_seconds,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BASE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "head_dim": 16,
}
MODELS = {
    "Qwen3Moe": {**_BASE, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True},
    "DeepseekV2": {**_BASE, **_LATENT},
}
WIDE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--bandwidth", type=float, help="bytes per second; default: a copy's")
    options = parser.parse_args()
    failed = sum(_same_tokens(name, options) for name in MODELS)
    failed += sum(_same_rounded_tokens(type, options.device) for type in ("q4_0", "q8_0"))
    if options.speed:
        _speed(options)
    print(f"verdict: {'FAILED' if failed else 'all tokens equal the ones of transformers'}")
    return failed


def _model_of(name: str) -> "PreTrainedModel":
    import transformers

    torch.manual_seed(7)
    make = getattr(transformers, f"{name}Config")
    config = make(**MODELS[name], initializer_range=0.2, eos_token_id=None, bos_token_id=None)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def _same_tokens(name: str, options: argparse.Namespace) -> int:
    """How many ways to run it give other tokens than transformers."""
    model = _model_of(name)
    prompts = prompts_of([5 + 11 * i for i in range(5)])
    wanted = [greedy(model, prompt, 24) for prompt in prompts]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for way, flags in {"captured": {}, "eager": {"disable_cuda_graph": True}}.items():
            got, summary = generate(folder, prompts, 24, options.device, **flags)
            same = sum(a == b for a, b in zip(got, wanted * 2, strict=True))
            failed += same < len(got)
            print(f"{name}: {same}/{len(got)} as transformers, {way} ({summary})")
    return failed


def _same_rounded_tokens(type: str, device: str) -> int:
    """Whether a model with experts rounded at load gives other tokens than on the CPU: 0 or 1."""
    prompts = prompts_of([5 + 11 * i for i in range(5)])
    with tempfile.TemporaryDirectory() as folder:
        _model_of("Qwen3Moe").save_pretrained(folder)
        wanted, _ = generate(folder, prompts, 24, "cpu", quantization=type)
        got, summary = generate(folder, prompts, 24, device, quantization=type)
    same = sum(a == b for a, b in zip(got, wanted, strict=True))
    print(f"Qwen3Moe: {same}/{len(got)} as on the CPU, rounded to {type} ({summary})")
    return int(same < len(got))


def _speed(options: argparse.Namespace) -> None:
    shape = {**(MODELS["Qwen3Moe"] if options.small else WIDE)}
    shape["num_hidden_layers"] = options.layers
    facts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    facts |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e6}
    facts["torch_dtype"] = "float32" if options.device == "cpu" else "bfloat16"
    flags = {"cuda_graph_bs": options.rows}
    with random_engine({**facts, **shape}, options.device, options.rows, **flags) as engine:
        for rows in options.rows:
            _report(engine, rows, shape, options)


def _report(
    engine: banyan.Engine, rows: int, shape: dict[str, int], options: argparse.Namespace
) -> None:
    step = step_seconds(engine, rows, shape["vocab_size"])
    count, per_token = shape["num_experts"], shape["num_experts_per_tok"]
    active = count * (1 - (1 - per_token / count) ** rows)
    dim, heads = shape["hidden_size"], shape["num_attention_heads"] + shape["num_key_value_heads"]
    experts = active * 3 * dim * shape["moe_intermediate_size"]
    others = 2 * dim * heads * shape["head_dim"] + 2 * dim * count
    read = 2 * (shape["num_hidden_layers"] * (experts + others) + dim * shape["vocab_size"])
    bandwidth = options.bandwidth or copied_bytes_per_second(options.device)
    print(
        f"{rows:>4} rows: {step * 1e6:8.1f} us a step of {shape['num_hidden_layers']} layers, "
        f"{active:.0f} active experts by evenness, {read / bandwidth / step:6.1%} of the "
        "bandwidth bound"
    )


if __name__ == "__main__":
    raise SystemExit(main())
