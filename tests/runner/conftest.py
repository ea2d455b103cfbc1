"""A tiny random Llama, as transformers computes it and as the runner executes it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import FULL, ModelConfig
from banyan.models.decoder import DecoderLM
from banyan.models.weights.loader import load_model
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.parallel.groups import ALONE, Groups
from banyan.platform.base import Platform
from banyan.platform.cuda import CudaPlatform
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from tests.support.captured import Elsewhere, SampledInTensors
from tests.support.runner_driver import PAGE

VOCAB, MAX_LENGTH, NUM_PAGES = 131, 192, 1024
SHAPES = (1, 2, 4, 8, 16, 32, 40)
CPU = torch.device("cpu")


def build_runner(
    model_config: ModelConfig,
    groups: Groups = ALONE,
    wrap: Callable[[DecoderLM], DecoderLM] = lambda model: model,
    is_recorded: bool = False,
    platform: Platform | None = None,
    multi_step: int = 1,
    max_tokens: int = 0,
    prompt_shapes: tuple[int, ...] = (),
) -> ModelRunner:
    """A fresh runner, over compiled kernels whose steps are recorded or over torch's; `wrap` may
    spoil or watch the model."""
    toolkit = open_toolkit("cpu", 2, {}) if is_recorded else NO_TOOLKIT
    device = CPU if platform is None else platform.open(0, 2)
    ops = bind(
        *(device.type, device, torch.float32, frozenset(), model_config.head_dim),
        exact=True,
        cache_dtype=torch.float32,
        toolkit=toolkit,
        page_size=PAGE,
    )
    is_elsewhere = isinstance(platform, Elsewhere)
    build = Build(SampledInTensors(ops) if is_elsewhere else ops, groups, device=device)
    model = wrap(load_model(model_config, build))
    layout = GroupLayout(FULL, 0, PAGE, NUM_PAGES)
    most = 64 if is_recorded else max_tokens
    more = {"multi_step": multi_step, "prompt_shapes": prompt_shapes}
    sizes = RunnerConfig(40, MAX_LENGTH, (layout,), most, SHAPES, **more)
    runner = ModelRunner(model, build, sizes, platform)
    assert runner.forward.is_recorded == is_recorded
    for layer in (0, 1):  # whoever reads a page that its sequence did not write gets no number
        for pages in runner.store.tensors(layer).values():
            pages.fill_(float("nan"))
    return runner


@pytest.fixture(scope="session")
def llama() -> nn.Module:
    """A random Llama of two layers; its weights are large enough for sharp distributions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model_config(llama: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    return read_model_config(str(folder))


@pytest.fixture(params=["eager", "recorded", "captured", "cuda"], scope="module")
def make_runner(
    model_config: ModelConfig, request: pytest.FixtureRequest
) -> Callable[[], ModelRunner]:
    """ "captured": on a device that is not the host, whose decode steps are captured by shape;
    "cuda": on a real one."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        return lambda: build_runner(model_config, platform=CudaPlatform())
    if request.param == "captured":
        return lambda: build_runner(model_config, platform=Elsewhere())
    return lambda: build_runner(model_config, is_recorded=request.param == "recorded")


@pytest.fixture
def make_wrapped(model_config: ModelConfig) -> Callable[..., ModelRunner]:
    return lambda wrap: build_runner(model_config, wrap=wrap)
