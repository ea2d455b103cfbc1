"""A causal model of the transformers library, run by this engine with its own attention.

Used for architectures without a family here (--model-impl transformers). The library builds and
loads the model. Every projection becomes a packed weight, and each attention call goes to the
step's pages. A trial pass at load refuses models whose tokens could depend on their batch or whose
attention does not use the library's interface.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from banyan.base.errors import ConfigError, ModelError
from banyan.base.log import printable
from banyan.base.torch_parts import complete_torch
from banyan.layers.attention import paged_cache
from banyan.layers.build import Build
from banyan.layers.step_inputs import AttentionSpec, StepInputs
from banyan.model_config.model_config import WINDOW, ModelConfig
from banyan.models.base import NO_TOWERS
from banyan.ops.api import Ops, PackedLinear
from banyan.ops.stored import StoredWeight

_INTERFACE = "banyan"
_BATCH_DEPENDENT_ROPES = ("dynamic", "longrope")
_ELSEWHERE = "serve it with the library itself, or with an engine that has this architecture"


class _Call(Protocol):
    """One attention call of the library."""

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; returns as q."""
        ...


class _CurrentCall:
    """Holds the attention call of the current step for all attention modules of a model."""

    call: _Call


class _HasCurrentCall(Protocol):
    """An attention module of the library with a `_CurrentCall`."""

    current: _CurrentCall


class _HasHead(Protocol):
    """A causal model of the library."""

    def get_output_embeddings(self) -> nn.Module: ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """The library's attention interface. query, key, value: [1, heads, tokens, head_dim]."""
    if more.get("s_aux") is not None or more.get("position_bias") is not None:
        raise ModelError("its attention has sinks or a bias of its own", hint=_ELSEWHERE)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    spec = AttentionSpec(
        layer=cast(int, module.layer_idx),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        scale=scaling or q.shape[2] ** -0.5,
        window=sliding_window or 0,
        soft_cap=softcap or 0.0,
    )
    return cast(_HasCurrentCall, module).current.call(spec, q, k, v).unsqueeze(0), None


class _FixedBody(nn.Module):
    """Replaces the body of the library's model when only its head is run."""

    hidden: Tensor
    """Output of the body, [1, n, hidden_size]."""

    def forward(self, *inputs: object, **named: object) -> object:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


class _PackedProjection(nn.Module):
    """A projection with a packed weight."""

    def __init__(self, weight: PackedLinear, bias: Tensor | None) -> None:
        super().__init__()
        self.packed = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.packed(rows, self.bias).view(*x.shape[:-1], -1)


class TransformersLM(nn.Module):
    """
    Args:
        model: a causal model of the library, built with the attention interface above.

    Raises:
        ModelError: its attention cannot be replaced.
    """

    prunes_to_outputs = False
    takes_features = False
    towers = NO_TOWERS

    def __init__(self, model: nn.Module, model_config: ModelConfig, build: Build) -> None:
        super().__init__()
        prefix = cast(str, model.base_model_prefix)
        self.model_config = model_config
        self.dtype = build.dtype
        self.body = model.get_submodule(prefix)
        self.fixed_body = _FixedBody()
        setattr(model, prefix, self.fixed_body)
        self.head = model
        self.current = _CurrentCall()
        for module in self.body.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                cast(_HasCurrentCall, module).current = self.current
        _pack_projections(self, cast(_HasHead, model).get_output_embeddings(), build.ops)
        self.caches = [paged_cache(spec, build, spec.kv_heads) for spec in self._try()]

    def forward(self, step: StepInputs) -> Tensor:
        """returns: hidden states after the last norm, [tokens, hidden_size]."""
        return self._run(step.tokens, step.positions, step.attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden_size]; returns [n, vocab_size] fp32."""
        self.fixed_body.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        return self.head(input_ids=ids, use_cache=False).logits[0].float()

    def _run(self, tokens: Tensor, positions: Tensor, call: _Call) -> Tensor:
        self.current.call = call
        out = self.body(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        return out.last_hidden_state[0]

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled

    def _try(self) -> list[AttentionSpec]:
        """Run one pass over two tokens to check that every layer calls our attention with the
        configured sizes.

        returns: the spec of each layer's call.
        """
        seen: dict[int, AttentionSpec] = {}

        def call(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen[spec.layer] = spec
            return q

        model_config, name = self.model_config, printable(self.model_config.architecture)
        tokens = torch.zeros(2, dtype=torch.int64)
        try:
            hidden = self._run(tokens, torch.arange(2), call)
            logits = self.logits(hidden)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ModelError(
                f"{name} cannot run with another attention: {printable(str(error), 200)}",
                hint=_ELSEWHERE,
            ) from error
        for layer in range(model_config.num_layers):
            _check_layer(model_config, layer, seen.get(layer))
        if logits.shape != (2, model_config.vocab_size):
            raise ModelError(f"{name} gives logits {list(logits.shape)}, not [2, vocabulary]")
        return [seen[layer] for layer in range(model_config.num_layers)]


def _check_layer(model_config: ModelConfig, layer: int, spec: AttentionSpec | None) -> None:
    name = printable(model_config.architecture)
    if spec is None:
        raise ModelError(
            f"{name}: layer {layer} does not attend through the library's interface",
            hint=_ELSEWHERE,
        )
    window = model_config.window if model_config.kind_of(layer) == WINDOW else 0
    asked = (spec.heads, spec.kv_heads, spec.head_dim, spec.window)
    stated = (model_config.num_heads, model_config.num_kv_heads, model_config.head_dim, window)
    if asked != stated:
        raise ModelError(
            f"{name}: layer {layer} attends with heads, kv heads, head size and window {asked}, "
            f"its configuration says {stated}",
            hint=_ELSEWHERE,
        )


def _pack_projections(model: nn.Module, head: nn.Module | None, ops: Ops) -> None:
    """Replace plain projections by packed weights; other modules stay the library's."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                stored = StoredWeight.from_tensor(child.weight.detach())
                packed = ops.pack_linear(stored, is_head=child is head)
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, _PackedProjection(packed, bias))


def load_transformers_model(
    model_config: ModelConfig, build: Build, load_format: str = "auto"
) -> TransformersLM:
    """Build a model with the library and load its weights.

    Raises:
        ConfigError: the library is missing, several ranks, or an unsupported load format.
        ModelError: weights that do not fit, or a model that cannot be served this way.
    """
    if build.groups.world.size > 1:
        raise ConfigError("--model-impl transformers cannot share a model", hint="use --tp 1")
    if load_format not in ("auto", "safetensors"):
        raise ConfigError(f"--model-impl transformers cannot load the format {load_format}")
    complete_torch()
    try:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            "--model-impl transformers needs the package transformers",
            hint="run: pip install transformers",
        ) from None
    AttentionInterface.register(_INTERFACE, _attention)
    config = AutoConfig.from_pretrained(
        model_config.path, local_files_only=True, trust_remote_code=False
    )
    _check_ropes(config.to_dict().get("rope_parameters"), model_config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_config.path,
        config=config,
        dtype=build.dtype,
        attn_implementation=_INTERFACE,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, account = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if account[kind]:
            found = ", ".join(printable(str(key)) for key in sorted(account[kind], key=str)[:5])
            raise ModelError(f"the checkpoint has {kind.replace('_', ' ')}: {found}")
    with torch.inference_mode():
        return TransformersLM(model.to(build.device).eval(), model_config, build).eval()


def _check_ropes(parameters: object, model_config: ModelConfig) -> None:
    """Refuse frequencies that the library chooses by the longest position of a batch."""
    if not isinstance(parameters, dict):
        return
    for part in (parameters, *parameters.values()):
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind in _BATCH_DEPENDENT_ROPES:
            raise ModelError(
                f"{printable(model_config.architecture)} has RoPE of kind {kind}, which the "
                "library "
                "chooses by the longest sequence of a batch",
                hint="leave --model-impl at auto if the family is known here",
            )
