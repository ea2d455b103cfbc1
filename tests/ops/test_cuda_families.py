"""Models with states and with an indexer over the Triton kernels, with captured decode steps; where
they run: `triton_device.py`. Without a device `Elsewhere` has the graphs."""

import numpy as np
import pytest
import torch

from banyan.layers.build import Build
from banyan.layers.cache_spec import group_caches
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.ops.cuda import needs
from banyan.platform.cuda import CudaPlatform
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from tests.models.families import tiny
from tests.ops.triton_device import ABSENCE, IS_INTERPRETED
from tests.support.captured import Elsewhere
from tests.support.logits import expected_logits
from tests.support.runner_driver import PAGE, Driver, Request, greedy

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)
VOCAB = 97
VARIANTS = {
    "qwen3 next": {"num_hidden_layers": 4},
    "falcon h1": {"num_hidden_layers": 2},
    "mamba": {"num_hidden_layers": 2},
    "kimi linear": {},
    "lfm2": {},
    "deepseek v3.2": {"num_hidden_layers": 2},
}


@pytest.fixture(params=VARIANTS)
def made(request, tmp_path):
    return tiny(request.param, tmp_path, **VARIANTS[request.param]), tmp_path


def open_runner(folder, monkeypatch) -> ModelRunner:
    if IS_INTERPRETED:
        monkeypatch.setattr(needs, "declines_device", lambda spec: None)
    platform = Elsewhere() if IS_INTERPRETED else CudaPlatform()
    device = platform.open(0, 2)
    model_config = read_model_config(str(folder))
    sizes = {"exact": True, "cache_dtype": torch.float32, "page_size": PAGE}
    ops = bind("cuda", device, torch.float32, frozenset(), model_config.head_dim, **sizes)
    build = Build(ops, device=device)
    model = load_model(model_config, build)
    layouts = tuple(GroupLayout(g.kind, g.window, PAGE, 32) for g in group_caches(model.caches))
    runner = ModelRunner(model, build, RunnerConfig(4, 64, layouts, 64, (1, 4)), platform)
    for cache in model.caches:  # who reads what no row has written gets no number
        for pages in runner.store.tensors(cache.layer).values():
            pages[1:].fill_(float("nan"))
    return runner


def test_captured_decode_steps_give_the_numbers_of_transformers(made, monkeypatch):
    model, folder = made
    runner = open_runner(folder, monkeypatch)
    assert runner.forward.how == "captured"
    draw = np.random.default_rng(5)
    requests = [
        Request(draw.integers(0, VOCAB, n).tolist(), greedy(4), score_from=n) for n in (21, 9, 5)
    ]

    Driver(runner).run(requests, chunk=16)

    for request in requests:
        tokens = request.prompt + request.output
        logprobs = expected_logits(model, tokens).log_softmax(-1)
        first = len(request.prompt)
        want = [float(logprobs[p - 1, tokens[p]]) for p in range(first, len(tokens))]
        got = [request.scores[p] for p in range(first, len(tokens))]
        np.testing.assert_allclose(got, want, atol=1e-3)
        assert request.output == logprobs[first - 1 : -1].argmax(-1).tolist()
