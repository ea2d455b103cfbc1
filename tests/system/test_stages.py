"""Layers in stages, each held by ranks of its own, give the tokens of one rank."""

import os

import psutil
import pytest
import torch

import banyan
from banyan.base.errors import ConfigError
from tests.models.families import tiny

PROMPTS = [[(5 * i * i + 3 * i + shift) % 97 for i in range(9 + 13 * shift)] for shift in range(4)]
SAMPLING = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}


def answers(path, ranks=0, **flags) -> list[list[int]]:
    with banyan.Engine(
        model_path=str(path),
        skip_tokenizer_init=True,
        cpu_activations="fp32",
        threads=1,
        chunked_prefill_size=16,
        max_total_tokens=1024,
        max_running_requests=4,
        **flags,
    ) as engine:
        (pid,) = engine.get_all_child_pids()
        assert not ranks or len(psutil.Process(pid).children()) == ranks - 1
        found = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
    return [answer["output_ids"] for answer in found]


def test_stages_hold_layers_that_one_rank_could_not_share(tmp_path):
    """Seven layers in windows and without, in three stages: two stages hold no full layer."""
    reference = tiny("gemma3", tmp_path)

    found = answers(tmp_path, 3, pp_size=3)

    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in output:
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        assert output == ids[len(prompt) :]


LAYOUTS = [
    ("deepseek v3", {"tp_size": 2, "pp_size": 2}),
    ("mistral", {"pp_size": 4}),
    ("qwen3, bias", {"tp_size": 2, "pp_size": 2}),
    ("gemma3", {"tp_size": 2, "pp_size": 3}),
    ("qwen3 moe, six of 21", {"tp_size": 2, "ep_size": 2, "pp_size": 2}),
    ("qwen2, eight heads", {"tp_size": 4}),
]
IS_ALL = os.environ.get("PARALLEL") == "all"


@pytest.mark.parametrize(("variant", "layout"), LAYOUTS if IS_ALL else LAYOUTS[:1])
def test_ranks_and_stages_give_the_tokens_of_one_rank(variant, layout, tmp_path):
    tiny(variant, tmp_path)

    assert answers(tmp_path, **layout) == answers(tmp_path)


@pytest.mark.parametrize(
    ("variant", "match"),
    [("mistral", "the model has 4 layers"), ("gemma3", "the model has 7 layers")],
)
def test_more_stages_than_layers_are_refused(variant, match, tmp_path):
    tiny(variant, tmp_path)

    with pytest.raises(ConfigError, match=match):
        answers(tmp_path, pp_size=8)
