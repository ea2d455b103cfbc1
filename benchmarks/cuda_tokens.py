"""A tiny random Llama in float32, the greedy tokens that transformers gives for it, and engines
that must give the same: what the checks of a CUDA device have in common.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

import banyan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_llama() -> "PreTrainedModel":
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(**TINY, initializer_range=0.2, eos_token_id=None, bos_token_id=None)
    return LlamaForCausalLM(config).eval()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [[(7 * i + j * j) % 512 for j in range(length)] for i, length in enumerate(lengths)]


def greedy(model: "PreTrainedModel", prompt: list[int], count: int) -> list[int]:
    """The tokens with which transformers goes on."""
    ids = torch.tensor([prompt])
    more = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    return model.generate(ids, max_new_tokens=count, **more)[0, len(prompt) :].tolist()


def sampling(count: int) -> dict[str, object]:
    """Parameters of just so many greedy tokens."""
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}


@contextmanager
def started(
    folder: str, device: str, dtype: str = "float32", **flags: object
) -> Iterator[banyan.Engine]:
    """An engine that computes in this type and keeps it in pages."""
    with banyan.Engine(
        folder,
        device=device,
        dtype=dtype,
        kv_cache_dtype="fp32" if dtype == "float32" else "auto",
        cpu_activations="fp32",
        skip_tokenizer_init=True,
        **{"engine_mode": "inprocess", "max_total_tokens": 32768, **flags},
    ) as engine:
        yield engine


def generate(
    folder: str,
    prompts: list[list[int]],
    count: int,
    device: str,
    dtype: str = "float32",
    **flags: object,
) -> tuple[list[list[int]], str]:
    """The answers to all prompts, asked twice, and how they came about."""
    with started(folder, device, dtype, **flags) as engine:
        answers = [
            answer
            for _ in range(2)  # the second time from the cache
            for answer in engine.generate(input_ids=prompts, sampling_params=sampling(count))
        ]
        steps = engine.get_server_info()["facts"]["steps"]
    metas = [answer["meta_info"] for answer in answers]
    cached = sum(meta["cached_tokens"] for meta in metas)
    checks = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    told = f"{steps}, {cached} tokens cached, {checks} verifications"
    return [answer["output_ids"] for answer in answers], told
