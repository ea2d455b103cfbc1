"""Models of experts, of latent attention and of states: that their steps are recorded changes no
bit."""

import numpy as np
import pytest
import torch

from banyan.layers.build import Build
from banyan.layers.cache_spec import group_caches
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind, open_toolkit
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from tests.models import test_gguf_hybrids
from tests.models.families import tiny
from tests.support.logits import expected_logits
from tests.support.runner_driver import PAGE, Driver, Request, greedy

CPU = torch.device("cpu")
VOCAB = 97
VARIANTS = {
    "mixtral": {"sliding_window": None},
    "olmoe": {},
    "qwen2 moe": {},
    "qwen2 moe, some dense": {},
    "qwen3 moe": {"head_dim": 16},
    "phi moe": {},
    "gpt-oss": {"layer_types": ["full_attention"] * 4},
    "step 3.7": {"head_dim": 40},
    "deepseek v2": {},
    "deepseek v2, groups, yarn": {},
    "deepseek v3": {},
    "deepseek v3.2": {},
    "lfm2": {},
    "lfm2, attention first, biases": {},
    "mamba2": {},
    "mamba": {},
    "jamba": {},
    "bamba": {},
    "falcon h1": {},
    "nemotron h": {},
    "granite hybrid, experts, rope": {},
    "lfm2 moe": {},
    "minimax, all factors": {"head_dim": 16},
    "qwen3.5": {},
    "zamba2": {"num_attention_heads": 12, "num_key_value_heads": 12},
    "kimi linear": {},
    "qwen3 next": {},
    "qwen3 next, dense, shared keys": {},
}
"""Variants of tests/models/family_*.py -> what lets the compiled attention take them."""
ONE_OF_EACH_KIND = (
    *("qwen3 moe", "gpt-oss", "deepseek v2", "deepseek v3.2", "lfm2", "mamba", "mamba2", "jamba"),
    *("falcon h1", "minimax, all factors", "qwen3.5", "kimi linear", "zamba2"),
)
"""Experts, sinks, latents, an indexer, each kind of state, and blocks of several kinds."""


def open_runner(folder, exact: bool = True, max_tokens: int = 64) -> ModelRunner:
    """Over compiled kernels; max_tokens 0 = the model is called anew at each step."""
    model_config = read_model_config(str(folder))
    ops = bind(
        *("cpu", CPU, torch.float32, frozenset(), model_config.head_dim),
        exact=exact,
        toolkit=open_toolkit("cpu", 2, {}),
        page_size=PAGE,
    )
    build = Build(ops)
    model = load_model(model_config, build)
    layouts = tuple(GroupLayout(g.kind, g.window, PAGE, 256) for g in group_caches(model.caches))
    runner = ModelRunner(model, build, RunnerConfig(12, 128, layouts, max_tokens))
    for cache in model.caches:  # who reads what no row has written gets no number
        for pages in runner.store.tensors(cache.layer).values():
            pages.fill_(float("nan"))
    return runner


def requests(count: int = 9) -> list[Request]:
    draw = np.random.default_rng(5)
    lengths = draw.integers(2, 70, count)
    return [
        Request(draw.integers(0, VOCAB, int(n)).tolist(), greedy(6), score_from=0) for n in lengths
    ]


def scores(request: Request) -> list[float]:
    return [request.scores[p] for p in range(1, request.known)]


@pytest.fixture(
    params=[
        name if name in ONE_OF_EACH_KIND else pytest.param(name, marks=pytest.mark.full)
        for name in VARIANTS
    ],
    scope="module",
)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return tiny(request.param, folder, **VARIANTS[request.param]), folder


def test_a_recorded_step_has_the_bits_of_one_that_is_not(made):
    _, folder = made
    recorded, eager = open_runner(folder), open_runner(folder, max_tokens=0)
    assert (recorded.forward.how, eager.forward.how) == ("recorded", "eager")
    mine, theirs = requests(), requests()

    Driver(recorded).run(mine, chunk=16)
    Driver(eager).run(theirs, chunk=16)

    for got, want in zip(mine, theirs, strict=True):
        assert got.output == want.output
        assert scores(got) == scores(want)


def test_a_request_has_the_same_bits_alone_and_in_any_batch(made):
    runner = open_runner(made[1])
    together, alone = requests(), requests()

    Driver(runner).run(together, chunk=7)

    driver = Driver(open_runner(made[1]))
    for request in alone:
        driver.run([request])
    for got, want in zip(together, alone, strict=True):
        assert got.output == want.output
        assert scores(got) == scores(want)


def test_recorded_steps_give_the_numbers_of_transformers(made):
    model, folder = made
    mine = requests(3)

    Driver(open_runner(folder)).run(mine)

    for request in mine:
        tokens = request.prompt + request.output
        logprobs = expected_logits(model, tokens).log_softmax(-1)
        want = [float(logprobs[p - 1, tokens[p]]) for p in range(1, len(tokens))]
        np.testing.assert_allclose(scores(request), want, atol=1e-4)


def test_value_heads_that_lie_in_turns_are_recorded_too(tmp_path):
    """As GGUF files of Qwen3.5 have them."""
    model, path = test_gguf_hybrids.made("qwen3.5", tmp_path)
    recorded, eager = open_runner(path), open_runner(path, max_tokens=0)
    assert (recorded.forward.how, eager.forward.how) == ("recorded", "eager")
    mine, theirs = requests(3), requests(3)

    Driver(recorded).run(mine, chunk=16)
    Driver(eager).run(theirs)

    assert [scores(request) for request in mine] == [scores(request) for request in theirs]
    tokens = mine[0].prompt + mine[0].output
    logprobs = expected_logits(model, tokens).log_softmax(-1)
    want = [float(logprobs[p - 1, tokens[p]]) for p in range(1, len(tokens))]
    np.testing.assert_allclose(scores(mine[0]), want, atol=1e-4)
