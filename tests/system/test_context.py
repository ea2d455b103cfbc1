"""Ranks that divide the tokens of prompts, behind the whole engine: --attn-cp-size."""

import os

import numpy as np
import psutil
import pytest

import banyan
from banyan.base.errors import ConfigError
from tests.models.families import tiny
from tests.support.drafts import REQUESTS, output_of, start
from tests.support.drafts import answers as ask
from tests.support.hidden_drafts import ahead, with_words
from tests.support.nodes import FEW, node, outputs
from tests.system.serving import free_port, serving, wait_ready

ALL = bool(os.environ.get("PARALLEL"))
IN_ALL = pytest.mark.skipif(not ALL, reason="make test-parallel")
DIVIDED = {"tp_size": 2, "attn_cp_size": 2}
PROMPTS = [[(5 * i * i + 3 * i + shift) % 97 for i in range(3 + 14 * shift)] for shift in range(4)]
AGAIN = PROMPTS[3][:33] + [7, 9, 11, 13, 5]
EMBEDS = np.random.default_rng(6).normal(size=(37, 48)).astype(np.float32)
GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}


def answers(path, **flags) -> tuple[list[tuple[list[int], list[float]]], int, int]:
    """Tokens and log-probabilities, of prompts too; tokens of prompts that were in the cache; and
    how many processes there were."""
    with banyan.Engine(
        model_path=str(path),
        skip_tokenizer_init=True,
        cpu_activations="fp32",
        threads=1,
        page_size=16,
        chunked_prefill_size=16,
        max_total_tokens=1024,
        max_running_requests=4,
        log_level="error",
        **flags,
    ) as engine:
        processes = len(psutil.Process().children(recursive=True))
        asked = {"sampling_params": GREEDY, "return_logprob": True}
        found = engine.generate(input_ids=PROMPTS, logprob_start_len=0, **asked)
        found += engine.generate(input_ids=[AGAIN], **asked)
        cached = found[-1]["meta_info"]["cached_tokens"]
        found.append(engine.generate(input_embeds=EMBEDS.tolist(), **asked))
    values = [
        [v for v, *_ in a["meta_info"]["input_token_logprobs"] if v is not None]
        + [v for v, *_ in a["meta_info"]["output_token_logprobs"]]
        for a in found
    ]
    output_of = [(a["output_ids"], v) for a, v in zip(found, values, strict=True)]
    return output_of, cached, processes


def test_ranks_that_divide_prompts_give_the_tokens_of_one(tmp_path):
    """Three heads cannot be cut in two, nor need they be."""
    tiny("mistral", tmp_path, **THREE_HEADS)
    with pytest.raises(ConfigError, match="3 attention heads"):
        answers(tmp_path, tp_size=2)
    one, cached, alone = answers(tmp_path)
    two, as_many, processes = answers(tmp_path, **DIVIDED)
    assert processes == alone + 1 and as_many == cached >= 32
    for (tokens, values), (same, close) in zip(two, one, strict=True):
        assert tokens == same and len(values) == len(close) >= 10
        assert max(abs(a - b) for a, b in zip(values, close, strict=True)) <= 1e-5


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        pytest.param("deepseek v3", {}, marks=IN_ALL),
        pytest.param("deepseek v3", {"cp_strategy": "interleave"}, marks=IN_ALL),
        pytest.param("mistral", {"chunked_prefill_size": 16}, marks=IN_ALL),
        pytest.param("qwen3", {"chunked_prefill_size": 16}, marks=IN_ALL),
        pytest.param("qwen3", {"disable_cuda_graph": True}, marks=IN_ALL),
        pytest.param("qwen3", {"tp_size": 4, "cp_strategy": "interleave"}, marks=IN_ALL),
        pytest.param("", {"speculative_algorithm": "NGRAM"}, marks=IN_ALL),
        pytest.param("", {"speculative_algorithm": "STANDALONE"}, marks=IN_ALL),
    ],
)
def test_drafts_change_no_answer(tiny_model, tmp_path, variant, flags):
    """Layers that draft and models that do divide their own steps too."""
    names = ("greedy", "scored")
    model = with_words(variant, tmp_path, tiny_model) if variant else tiny_model
    layout = DIVIDED | {key: flags[key] for key in flags if not key.startswith("speculative")}
    beside = layout | flags
    if flags.get("speculative_algorithm") == "STANDALONE":
        beside["speculative_draft_model_path"] = str(tiny_model)
    with start(model, is_drafting=False, **layout) as engine:
        right = {
            name: [output_of(each) for each in ask(engine, **REQUESTS[name])] for name in names
        }
    with ahead(model, **beside) as engine:
        correct = 0
        for name in names:
            for _ in range(2):  # the second finds its prompt in the cache
                found = ask(engine, **REQUESTS[name])
                assert [output_of(each) for each in found] == right[name], name
                correct += sum(each["meta_info"]["spec_num_correct_drafts"] for each in found)
        assert correct > 0
        assert engine.stats().leaked == 0


@IN_ALL
@pytest.mark.parametrize(
    "flags", [("--attn-cp-size", "2"), ("--tp-size", "4", "--attn-cp-size", "2")]
)
def test_ranks_of_two_nodes_divide_prompts(tiny_model, tmp_path, flags):
    flags, port = (*flags, "--cpu-activations", "fp32"), free_port()
    with serving(tmp_path / "one.log", "--model-path", str(tiny_model), *FEW, *flags[-2:]) as one:
        expected = outputs(one)
    with (
        node(tmp_path, 1, port, tiny_model, *flags) as other,
        node(tmp_path, 0, port, tiny_model, *flags) as first,
    ):
        wait_ready(first)
        assert outputs(first) == expected
        assert "attn-cp-size" not in other.tail()


@IN_ALL
def test_a_node_that_divides_prompts_otherwise_is_turned_away(tiny_model, tmp_path):
    port = free_port()
    with (
        node(tmp_path, 0, port, tiny_model, "--attn-cp-size", "2"),
        node(tmp_path, 1, port, tiny_model) as other,
    ):
        assert other.exit_code(60) != 0
        assert "--attn-cp-size 1, the leader with --attn-cp-size 2" in other.tail()
