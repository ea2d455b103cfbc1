"""Choices of experts that an engine records, against those of the routers of transformers."""

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import banyan
from banyan.base.errors import ConfigError
from banyan.formats.arrays import read_arrays
from tests.models.families import tiny
from tests.support.expert_requests import GREEDY, PROMPTS
from tests.system.serving import Server, serving

OUTER = pytest.mark.skipif(os.environ.get("PARALLEL") != "all", reason="make test-parallel")
VARIANT = "qwen2 moe, some dense"


def routed(reference, tokens: list[int]) -> dict[int, torch.Tensor]:
    """Layer -> the experts of each token, best first; of every layer with a router."""
    found: dict[int, torch.Tensor] = {}
    hooks = []
    for number, layer in enumerate(reference.model.layers):
        gate = getattr(layer.mlp, "gate", None)
        if gate is None:
            continue

        def keep(module, inputs, output, number=number):
            logits = torch.nn.functional.linear(inputs[0], module.weight).flatten(0, -2)
            found[number] = logits.topk(reference.config.num_experts_per_tok).indices

        hooks.append(gate.register_forward_hook(keep))
    with torch.no_grad():
        reference(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return found


def counted(reference, answers, prompts) -> np.ndarray:
    config = reference.config
    counts = np.zeros((config.num_hidden_layers, config.num_experts), np.int64)
    for prompt, answer in zip(prompts, answers, strict=True):
        for layer, ids in routed(reference, (prompt + answer["output_ids"])[:-1]).items():
            counts[layer] += np.bincount(ids.flatten().numpy(), minlength=config.num_experts)
    return counts


def paths_in(message: str) -> list[str]:
    return re.findall(r"/\S+\.safetensors", message)


def flags_of(path: Path, layout: str, mode: str) -> list[str]:
    flags = "--cpu-activations fp32 --chunked-prefill-size 16 --disable-radix-cache --threads 1"
    flags += f" --skip-tokenizer-init --expert-distribution-recorder-mode {mode} {layout}"
    return ["--model-path", str(path), *flags.split(), "--enable-return-routed-experts"]


JOINED = "--tp 4 --ep 4 --dp 2 --enable-dp-attention --load-balance-method round_robin"
LAYOUTS = [
    ("--pp 2", [0]),  # layers 1 and 3 have experts, 1 alone, or 3 alone
    *(
        pytest.param(*layout, marks=OUTER)
        for layout in (
            ("--tp 2 --ep 2", [3]),
            ("--pp 2 --tp 2 --ep 2 --ep-num-redundant-experts 2", [1]),
            ("--pp 3", [3]),
            (JOINED, [0]),
            (f"{JOINED} --moe-a2a-backend deepep", [0]),
        )
    ),
]


@pytest.mark.parametrize(("layout", "dense"), LAYOUTS)
def test_what_is_recorded_equals_the_choices_of_the_routers(layout, dense, tmp_path, monkeypatch):
    """Of stages each has layers of its own, of joined replicas each has rows of its own."""
    reference = tiny(VARIANT, tmp_path / "model", mlp_only_layers=dense)
    (tmp_path / "dumps").mkdir()
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "dumps"))
    flags = flags_of(tmp_path / "model", layout, "stat")
    with serving(tmp_path / "server.log", *flags) as server:
        record = server_record(server)
        server.generate(input_ids=[7, 8, 9], sampling_params=GREEDY)
        assert "start_expert_distribution_record" in record("stop", 400)
        assert record("start") == "Start recording expert distribution.\n"
        body = {"input_ids": PROMPTS, "sampling_params": GREEDY, "return_routed_experts": True}
        answers = server.http.post("/generate", json=body).json()
        record("stop")
        server.generate(input_ids=[7, 8, 9], sampling_params=GREEDY)
        (path,) = paths_in(record("dump"))

    assert path.startswith(str(tmp_path / "dumps"))
    found = read_arrays(path)["logical_count"]
    assert np.array_equal(found, counted(reference, answers, PROMPTS)) and found.sum()
    sparse = [layer for layer in (1, 3) if layer not in dense]
    assert np.flatnonzero(found.any(-1)).tolist() == sparse
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = reported_by(answer, layers=4, per_token=reference.config.num_experts_per_tok)
        for layer, ids in routed(reference, (prompt + answer["output_ids"])[:-1]).items():
            assert np.array_equal(whole[:, layer], ids.reshape(len(whole), -1).numpy())


def reported_by(answer: dict, layers: int, per_token: int) -> np.ndarray:
    text = answer["meta_info"]["routed_experts"]
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, layers, per_token)


@OUTER
@pytest.mark.parametrize("layout", [JOINED, "--dp 2 --load-balance-method round_robin"])
def test_each_replica_records_its_own_tokens(layout, tmp_path, monkeypatch):
    reference = tiny(VARIANT, tmp_path / "model", mlp_only_layers=[])
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path))
    flags = flags_of(tmp_path / "model", layout, "per_token")
    with serving(tmp_path / "server.log", *flags) as server:
        record = server_record(server)
        record("start")
        asked = {"input_ids": PROMPTS, "sampling_params": GREEDY}
        answers = server.http.post("/generate", json=asked).json()
        found = [read_arrays(path) for path in paths_in(record("dump"))]
    whole = [(p + a["output_ids"])[:-1] for p, a in zip(PROMPTS, answers, strict=True)]
    expected = [position for tokens in whole for position in range(len(tokens))]
    assert len(found) == 2 and all(len(one["positions"]) for one in found)
    assert sorted(np.concatenate([one["positions"] for one in found]).tolist()) == sorted(expected)
    counts = counted(reference, answers, PROMPTS)
    layers = found[0]["layers"].tolist()
    assert layers == [1, 3]
    for at, layer in enumerate(layers):
        chosen = np.concatenate([one["topk_ids"][:, at].ravel() for one in found])
        assert np.array_equal(np.bincount(chosen, minlength=counts.shape[1]), counts[layer])


def server_record(server: Server) -> Callable[..., str]:
    def record(verb: str, status: int = 200) -> str:
        answer = server.http.post(f"/{verb}_expert_distribution_record")
        assert answer.status_code == status, answer.text
        return answer.text

    return record


@pytest.mark.parametrize(
    ("variant", "flags", "match"),
    [
        ("mistral", {}, "this model has no experts"),
        (VARIANT, {"num_continuous_decode_steps": 4}, "--num-continuous-decode-steps"),
    ],
)
def test_what_choices_cannot_be_recorded_next_to_is_named(variant, flags, match, tmp_path):
    tiny(variant, tmp_path)
    with pytest.raises(ConfigError, match=match):
        banyan.Engine(
            model_path=str(tmp_path),
            skip_tokenizer_init=True,
            expert_distribution_recorder_mode="stat",
            **flags,
        )
