"""A tiny random Llama checkpoint with a real tokenizer: starts at once, answers nonsense."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 128, 2
CONTEXT = 2048
START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog while the banyan grows new roots.",
    "A server keeps pages of keys and values, and shares the prefix that requests have in common.",
    "def area(width, height):\n    return width * height\n",
    "One two three four five six seven eight nine ten eleven twelve.",
)


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write config, weights (float32) and tokenizer into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    start, end = (tokenizer.token_to_id(t) for t in (START, END))
    vocab = tokenizer.get_vocab_size()
    save_file(_weights(vocab, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(vocab, start, end))
    _write(folder / "generation_config.json", {"bos_token_id": start, "eos_token_id": end})
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": START,
            "eos_token": END,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _config(vocab: int, start: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": start,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def _weights(vocab: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        # Logits as spread as those of a trained model, so that neighbours do not tie.
        "lm_head.weight": matrix(vocab, HIDDEN, 2.0),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 2.0),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 2.0),
            f"{layer}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{layer}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    return weights


def _write(path: Path, facts: dict[str, object]) -> None:
    path.write_text(json.dumps(facts, indent=1), encoding="utf-8")
