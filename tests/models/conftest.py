"""Tiny random Llama checkpoints, and a way to run a model over its own page store."""

from collections.abc import Callable, Sequence

import pytest
import torch

from banyan.layers.cache_spec import group_caches
from banyan.layers.step_inputs import StepInputs
from banyan.model_config.model_config import ModelConfig, RopeFacts
from banyan.models.base import Model
from banyan.ops.bind import BoundOps, bind, open_toolkit
from banyan.runner.attention import GroupView, PagedAttentionBackend, StepGeometry
from banyan.runner.inputs import BoundStates
from banyan.runner.kvstore import GroupLayout, KVStore

CPU = torch.device("cpu")

PAGE_SIZE = 4
MAX_PAGES = 64


class PagedModel:
    """A model with pages for a few requests; each has its own page table, pages never next to
    each other."""

    def __init__(self, model: Model, num_requests: int = 1, max_pages: int = MAX_PAGES) -> None:
        self.model = model
        self.ops = bind("cpu", CPU, torch.float32, frozenset(), 16)
        groups = group_caches(model.caches)
        num_pages = 1 + num_requests * max_pages
        layouts = tuple(GroupLayout(g.kind, g.window, PAGE_SIZE, num_pages) for g in groups)
        self.store = KVStore(layouts, model.caches, CPU)
        for cache in model.caches:
            for tensor in self.store.tensors(cache.layer).values():
                tensor.fill_(float("nan"))
        pages = 1 + torch.arange(max_pages) * num_requests
        self.tables = torch.stack([pages + r for r in range(num_requests)]).int()
        self.lengths = [0] * num_requests

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[torch.Tensor]:
        """Run (request, new tokens) rows in one step; the logits of every token, a row each."""
        step = self.prepare(rows)
        return list(self.model.logits(self.model(step)).split([len(t) for _, t in rows]))

    def prepare(self, rows: Sequence[tuple[int, Sequence[int]]]) -> StepInputs:
        """The inputs of a step; its tokens count as done."""
        counts = [len(tokens) for _, tokens in rows]
        contexts = [self.lengths[request] for request, _ in rows]
        positions = torch.cat(
            [torch.arange(c, c + n) for c, n in zip(contexts, counts, strict=True)]
        )
        tables = self.tables[[request for request, _ in rows]]
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        pages = tables[row_of, positions // PAGE_SIZE].long()
        flat = pages * PAGE_SIZE + positions % PAGE_SIZE
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)

        contexts_on_device = torch.tensor(contexts, dtype=torch.int32)
        views = (GroupView(tables, flat),) * len(self.store.groups)
        geometry = StepGeometry(starts, contexts_on_device, views)
        step = StepInputs(
            tokens=torch.tensor([t for _, tokens in rows for t in tokens]),
            positions=positions,
            attention=PagedAttentionBackend(self.ops, self.store).bind(geometry),
            states=BoundStates(self.store, geometry),
        )
        for request, tokens in rows:
            self.lengths[request] += len(tokens)
        return step


@pytest.fixture
def ops():
    return bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16)


@pytest.fixture
def paged() -> Callable[..., PagedModel]:
    return PagedModel


def tiny_config(**changes):
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**{**sizes, **changes})


def model_config_of(config, path) -> ModelConfig:
    rope = dict(config.rope_parameters)
    facts = RopeFacts(
        theta=rope["rope_theta"],
        kind=rope["rope_type"],
        factor=rope.get("factor", 1.0),
        original_length=rope.get(
            "original_max_position_embeddings", config.max_position_embeddings
        ),
        **{
            name: rope[name]
            for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
            + ("attention_factor", "mscale", "mscale_all_dim", "truncate")
            if name in rope
        },
    )
    return ModelConfig(
        path=str(path),
        format="safetensors",
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        context_length=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        rope=facts,
        tie_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


@pytest.fixture
def tiny_llama(tmp_path):
    """make(**config changes) -> (transformers model, card of its saved checkpoint)."""
    from transformers import LlamaForCausalLM

    def make(max_shard_size="1GB", name="checkpoint", **changes):
        torch.manual_seed(7)
        config = tiny_config(**changes)
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.5))
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return model, model_config_of(config, folder)

    return make


@pytest.fixture(scope="module")
def compiled() -> BoundOps:
    toolkit = open_toolkit("cpu", 1, {})
    if toolkit.absence:
        pytest.skip(f"the compiled kernels cannot be built here: {toolkit.absence}")
    return bind("cpu", CPU, torch.float32, frozenset(), 16, toolkit=toolkit)
