"""--enable-double-sparsity: a transformers model whose attention is as sparse is the oracle."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from banyan import Engine
from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from tests.models.families import tiny

TOKENS, CHANNELS, THRESHOLD, STEPS = 5, 3, 12, 8
PROMPTS = [[(7 * i * i + 3 * i + n) % 97 for i in range(n)] for n in (40, 6)]
"""The second one becomes sparse while it is answered."""
FLAGS = {
    "enable_double_sparsity": True,
    "ds_heavy_channel_num": CHANNELS,
    "ds_heavy_token_num": TOKENS,
    "ds_sparse_decode_threshold": THRESHOLD,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    tiny("qwen3", folder, num_hidden_layers=2, max_position_embeddings=256)
    config = transformers.AutoConfig.from_pretrained(folder)
    generator = torch.Generator().manual_seed(3)
    lists = {
        f"model.layers.{layer}.self_attn.{kind}_proj": [
            torch.randperm(config.head_dim, generator=generator).tolist()
            for _ in range(config.num_key_value_heads)
        ]
        for layer in range(2)
        for kind in ("qk", "q")
    }
    (folder / "channels.json").write_text(json.dumps(lists))
    return folder


def served(model: Path, **flags: object) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities."""
    given = {"ds_channel_config_path": str(model / "channels.json")} | FLAGS | flags
    if not given["enable_double_sparsity"]:
        given = {"disable_cuda_graph": True}
    with Engine(
        str(model),
        engine_mode="inprocess",
        threads=1,
        max_total_tokens=1024,
        skip_tokenizer_init=True,
        cpu_activations="fp32",
        **given,
    ) as engine:
        params = {"max_new_tokens": STEPS, "temperature": 0, "ignore_eos": True}
        found = engine.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
    return [
        (each["output_ids"], [p for p, *_ in each["meta_info"]["output_token_logprobs"]])
        for each in found
    ]


def sparse(channels: dict[str, list[list[int]]]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of transformers, head by head."""

    def attend(
        module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **more: float
    ) -> tuple[Tensor, None]:
        heads, count, length = q.shape[1], q.shape[2], k.shape[2]
        out = torch.empty_like(q)
        for head in range(heads):
            kv = head * k.shape[1] // heads
            logits = q[0, head] @ k[0, kv].T * more["scaling"]
            causal = torch.ones(count, length).tril(length - count).bool()
            if count == 1 and length >= THRESHOLD:
                heavy = channels[f"model.layers.{module.layer_idx}.self_attn.qk_proj"][kv][
                    :CHANNELS
                ]
                near = q[0, head][:, heavy] @ k[0, kv][:, heavy].T
                chosen = near[0].topk(TOKENS).indices
                causal = torch.zeros(1, length).bool()
                causal[0, chosen] = True
            weights = logits.masked_fill(~causal, -torch.inf).softmax(-1)
            out[0, head] = weights @ v[0, kv]
        return out.transpose(1, 2), None

    return attend


def test_few_tokens_are_attended_to_as_the_flags_say(model: Path) -> None:
    channels = json.loads((model / "channels.json").read_text())
    transformers.AttentionInterface.register("few tokens", sparse(channels))
    reference = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    reference.config._attn_implementation = "few tokens"
    for prompt, (ids, logprobs) in zip(PROMPTS, served(model), strict=True):
        cache, given = transformers.DynamicCache(), torch.tensor([prompt])
        for token, logprob in zip(ids, logprobs, strict=True):
            with torch.no_grad():
                logits = reference(given, past_key_values=cache).logits[0, -1]
            assert int(logits.argmax()) == token
            assert abs(float(logits.log_softmax(-1)[token]) - logprob) < 1e-4
            given = torch.tensor([[token]])


def test_the_lists_of_the_kind_are_read(model: Path, tmp_path: Path) -> None:
    lists = json.loads((model / "channels.json").read_text())
    only_q = {name.replace("q_proj", "qk_proj"): at for name, at in lists.items() if ".q_" in name}
    (tmp_path / "q.json").write_text(json.dumps(only_q))
    of_q = served(model, ds_heavy_channel_type="q")
    assert of_q == served(model, ds_channel_config_path=str(tmp_path / "q.json")) != served(model)


@pytest.mark.parametrize(
    "flags",
    [{"ds_heavy_channel_num": 1}, {"ds_heavy_token_num": 2}, {"ds_sparse_decode_threshold": 100}],
    ids=lambda flags: next(iter(flags)),
)
def test_each_number_changes_what_is_attended_to(model: Path, flags: dict[str, object]) -> None:
    assert served(model, **flags) != served(model)


def test_a_context_below_the_threshold_is_dense(model: Path) -> None:
    dense = served(model, enable_double_sparsity=False)
    for found in (
        served(model, ds_sparse_decode_threshold=100),
        served(model, ds_heavy_token_num=99),
    ):
        assert found == dense


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"ds_channel_config_path": None}, "needs --ds-channel-config-path"),
        ({"ds_heavy_channel_type": "k"}, "k_proj has no list; the model has 2 heads"),
        ({"ds_heavy_channel_num": 99}, "a head without 99 channels from 0 to 9"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 packs them"),
        ({"tp_size": 2}, "each rank has other heads"),
        ({"speculative_algorithm": "NGRAM"}, "rows with drafts attend to all tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_sparse_is_refused(model: Path, flags: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        served(model, **flags)


def test_numbers_without_the_switch_are_reported() -> None:
    notes = parse(["M", "--ds-heavy-token-num", "9"], Environment()).observe.notes
    assert any("attention is dense without --enable-double-sparsity" in note for note in notes)
