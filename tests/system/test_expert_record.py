"""Choices of experts that an engine records, against those of the routers of transformers."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import banyan
from banyan.base.errors import ConfigError
from banyan.formats.arrays import read_arrays
from tests.models.families import tiny
from tests.system.serving import Server, serving
from tests.system.test_experts import GREEDY, PROMPTS

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


def path_in(told: str) -> str:
    found = re.search(r"/\S+\.safetensors", told)
    assert found, told
    return found.group()


def test_what_is_recorded_equals_the_choices_of_the_routers(tmp_path, monkeypatch):
    """Two ranks that each hold half of the experts."""
    reference = tiny(VARIANT, tmp_path / "model")
    (tmp_path / "dumps").mkdir()
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "dumps"))
    flags = "--tp 2 --ep 2 --cpu-activations fp32 --chunked-prefill-size 16 --disable-radix-cache"
    flags += " --skip-tokenizer-init --expert-distribution-recorder-mode stat --threads 1"
    model = ("--model-path", str(tmp_path / "model"))
    with serving(tmp_path / "server.log", *model, *flags.split()) as server:
        record = server_record(server)
        server.generate(input_ids=[7, 8, 9], sampling_params=GREEDY)
        assert "start_expert_distribution_record" in record("stop", 400)
        assert record("start") == "Start recording expert distribution.\n"
        answers = server.http.post(
            "/generate", json={"input_ids": PROMPTS, "sampling_params": GREEDY}
        ).json()
        record("stop")
        server.generate(input_ids=[7, 8, 9], sampling_params=GREEDY)
        told = record("dump")

    path = path_in(told)
    assert path.startswith(str(tmp_path / "dumps"))
    found = read_arrays(path)["logical_count"]
    assert np.array_equal(found, counted(reference, answers, PROMPTS)) and found.sum()
    assert [bool(counts.any()) for counts in found] == [False, True, False, False]


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
        (VARIANT, {"pp_size": 2}, "--pipeline-parallel-size do not go together"),
        (VARIANT, {"num_continuous_decode_steps": 4}, "--num-continuous-decode-steps"),
        (VARIANT, {"tp": 2, "dp": 2, "enable_dp_attention": True}, "--enable-dp-attention do"),
    ],
)
def test_what_choices_cannot_be_recorded_beside_is_named(variant, flags, match, tmp_path):
    tiny(variant, tmp_path)
    with pytest.raises(ConfigError, match=match):
        banyan.Engine(
            model_path=str(tmp_path),
            skip_tokenizer_init=True,
            expert_distribution_recorder_mode="stat",
            **flags,
        )
