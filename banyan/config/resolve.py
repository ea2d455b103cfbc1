"""Resolve: what the flags left open, decided by named rules in order, each logging what and why.

After this a Config does not change.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from types import MappingProxyType

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.buckets import check_the_bounds
from banyan.config.disposal import Moment, check_disposal
from banyan.config.env import Environment
from banyan.config.eviction import check_the_eviction
from banyan.config.execution import EXECUTION_RULES
from banyan.config.hicache import check_the_store
from banyan.config.multi_step import check_multi_step
from banyan.config.schema import DEMO, Config
from banyan.config.speculation import plan_the_drafts
from banyan.config.state_rules import check_the_states
from banyan.config.torchao import check_the_torchao
from banyan.context_parallel.rules import check_the_context
from banyan.disaggregation.rules import check_the_handoff
from banyan.dp_attention.rules import check_dp_attention, check_the_dense_blocks
from banyan.formats.shards import check_weight_files
from banyan.hub.catalogue import recognise
from banyan.hub.sources import fetch
from banyan.lora.rules import plan_the_adapters
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.draft_model import find_the_draft, fits
from banyan.model_config.encoders import read_pooling
from banyan.model_config.model_config import ModelConfig
from banyan.model_config.quantization import FLOAT_FORMS, SPELLINGS, spellings
from banyan.moe.dispatch_rules import share_the_experts
from banyan.moe.rules import check_the_expert_flags

log = logger(__name__)

_GRAMMAR_PACKAGES = MappingProxyType(
    {"xgrammar": "xgrammar", "llguidance": "llguidance", "outlines": "outlines_core"}
)
"""Backend -> what must be installed, the preferred first."""

_DEMO_SAMPLING = MappingProxyType({"temperature": 0.2, "top_p": 0.9})
_DEMO_TEMPLATE = "chatml"
_DEMO_CHAT_TOKENS = 1024


def prepare(config: Config, environment: Environment) -> tuple[Config, ModelConfig, dict[str, str]]:
    """Fetch the model that `config` names, read its facts and resolve the rest. Loads no weights.

    Returns:
        the resolved Config, the card, and the rule behind each schema field that a rule has set.

    Raises:
        ConfigError, ModelError: named after the flag or the key of the checkpoint that is wrong.
    """
    began = Moment.now()
    if config.model.implementation == "transformers":
        _check_the_library(config)
    config, model_config = find_the_model(config, environment)
    check_disposal(config, model_config, began)
    reads_mapped = config.model.load_format != "dummy" and not config.model.disable_mmap
    if model_config.format == "safetensors" and reads_mapped:
        check_weight_files(model_config.path)
    located = replace(config, model=replace(config.model, path=model_config.path))
    located = find_the_draft(located, model_config, environment, check_the_quantization)
    resolved, rules = resolve_with_origins(located, model_config, environment)
    return resolved, model_config, rules


def find_the_model(config: Config, environment: Environment) -> tuple[Config, ModelConfig]:
    """The facts of the model that `config` names, as it lies on this machine: fetched, perhaps."""
    model = config.model
    path = fetch(model, environment)
    config = serve_what_is_meant(config, path)
    is_foreign = model.implementation == "transformers"
    model_config = read_model_config(
        path, model.load_format, model.overrides, is_foreign=is_foreign
    )
    if config.model.is_embedding and model_config.pooling is None:
        model_config = replace(
            model_config, pooling=read_pooling(model_config), tie_embeddings=False
        )
    return config, model_config


def serve_what_is_meant(config: Config, path: str) -> Config:
    """An embedding model of the catalogue makes vectors, whether its file says so or not."""
    entry = recognise(config.model.source, path)
    if entry is None or entry.kind != "embedding" or config.model.is_embedding:
        return config
    _log("is-embedding", True, f"{entry.name} is an embedding model")
    return replace(config, model=replace(config.model, is_embedding=True))


def _check_the_library(config: Config) -> None:
    """Refuse what goes not together with --model-impl transformers."""
    flag = "--model-impl transformers"
    if config.model.is_embedding:
        raise ConfigError(
            f"--is-embedding cannot be combined with {flag}", hint="leave --model-impl at auto"
        )
    if config.model.load_format not in ("auto", "safetensors"):
        raise ConfigError(
            f"{flag} cannot load the format {config.model.load_format}",
            hint="leave --load-format at auto",
        )
    if config.parallel.tp * config.parallel.pp > 1:
        raise ConfigError(
            f"{flag} cannot share a model between ranks", hint="use --tp 1 and --pp 1"
        )
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{flag} needs the package transformers", hint="run: pip install transformers"
        )


def resolve(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """`config` with every rule applied."""
    return resolve_with_origins(config, model_config, environment)[0]


def resolve_with_origins(
    config: Config, model_config: ModelConfig, environment: Environment
) -> tuple[Config, dict[str, str]]:
    """As `resolve`, with the name of the rule behind each schema field that a rule has set."""
    origins: dict[str, str] = {}
    for rule in RULES:
        before, config = config, rule(config, model_config, environment)
        origins |= dict.fromkeys(_changed(before, config), rule.__name__)
    ruled = {name: f"rule {rule}" for name, rule in origins.items()}
    said = {**config.observe.origins, **ruled}
    return replace(config, observe=replace(config.observe, origins=said)), origins


def _changed(before: Config, after: Config) -> Iterator[str]:
    for part in fields(Config):
        old, new = getattr(before, part.name), getattr(after, part.name)
        for each in fields(old):
            if getattr(old, each.name) != getattr(new, each.name):
                yield f"{part.name}.{each.name}"


def name_the_model(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    if config.model.served_name:
        return config
    _log("served-model-name", config.model.source, "the model was named so")
    return replace(config, model=replace(config.model, served_name=config.model.source))


def find_the_tokenizer(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    path = config.model.tokenizer_path
    if path and not os.path.exists(path):
        raise ConfigError(
            f"--tokenizer-path {path!r} does not exist",
            hint="name one on this machine",
        )
    return replace(config, model=replace(config.model, tokenizer_path=path or model_config.path))


def check_the_journal(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    path = config.observe.journal
    folder = os.path.dirname(os.path.abspath(path))
    if path and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"--journal {path!r}: {folder!r} is not a folder that can be written",
            hint="name a file in another folder",
        )
    return config


def bound_the_context(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    wanted = config.model.context_length
    if wanted > model_config.context_length and not environment.allow_longer_context:
        raise ConfigError(
            f"--context-length {wanted:,} is more than the model's "
            f"{model_config.context_length:,} tokens",
            hint="lower it, or set BANYAN_ALLOW_LONGER_CONTEXT=1 if the model is known to bear it",
        )
    if wanted:
        return config
    _log("context-length", model_config.context_length, "the model was trained for it")
    return replace(config, model=replace(config.model, context_length=model_config.context_length))


def match_the_format(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    if config.model.load_format == "auto":
        return replace(config, model=replace(config.model, load_format=model_config.format))
    return config


def check_the_quantization(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    wanted = config.model.quantization
    if wanted == "unquant":
        return replace(config, model=replace(config.model, quantization=""))
    if wanted == "gguf":
        if model_config.format != "gguf":
            raise ConfigError(
                f"--quantization gguf: {config.model.source!r} holds {model_config.format}",
                hint="leave the flag out, or name a .gguf file",
            )
        return replace(config, model=replace(config.model, quantization=""))
    if wanted in spellings():
        if model_config.quant is None or wanted not in SPELLINGS.get(model_config.quant.method, ()):
            is_now = (
                f"{model_config.quant.method}"
                if model_config.quant is not None
                else model_config.dtype
            )
            raise ConfigError(
                f"--quantization {wanted} is not available for {config.model.source!r}: its "
                f"weights are {is_now}, and none are rounded to {wanted}",
                hint="leave the flag out; int8, q8_0, q4_0 and q4_1 round float weights, and so "
                "does --torchao-config fp8wo, to floats of 8 bits",
            )
        if wanted != model_config.quant.method:
            log.info(
                "--quantization %s: the weights are read as %s, as their checkpoint says",
                *(wanted, model_config.quant.method),
            )
        return replace(config, model=replace(config.model, quantization=""))
    if wanted and model_config.quant is not None and model_config.quant.method not in FLOAT_FORMS:
        raise ConfigError(
            f"--quantization {wanted}: the weights of {config.model.source!r} are "
            f"{model_config.quant.method} already, only float weights are rounded",
            hint="leave the flag out, or name a checkpoint of float weights",
        )
    if wanted and not model_config.stores_floats:
        raise ConfigError(
            f"--quantization {wanted}: the weights of {config.model.source!r} are "
            f"{model_config.dtype} "
            "already, only float weights are rounded",
            hint="leave the flag out, or name a checkpoint of float weights",
        )
    return config


def check_the_chunk(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    if config.schedule.chunk_tokens != 0:
        return config
    _log("chunked-prefill-size", -1, "0 asks for whole prompts")
    return replace(config, schedule=replace(config.schedule, chunk_tokens=-1))


def bound_the_prompts(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """After the context is known: a prompt that is not cut must fit into one step."""
    schedule, context = config.schedule, config.model.context_length
    if schedule.chunk_tokens > schedule.prefill_tokens:
        asked = schedule.prefill_tokens
        _log("chunked-prefill-size", asked, "--max-prefill-tokens is less", logging.INFO)
        return replace(config, schedule=replace(schedule, chunk_tokens=schedule.prefill_tokens))
    if schedule.chunk_tokens == -1 and schedule.prefill_tokens < context:
        why = "prompts are not cut, and may be as long"
        _log("max-prefill-tokens", context, why, logging.INFO)
        return replace(config, schedule=replace(schedule, prefill_tokens=context))
    return config


def check_the_ranks(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    tp, pp, ep = config.parallel.tp, config.parallel.pp, config.parallel.ep
    if pp > 1:
        _check_the_stages(config, model_config)
    if ep > 1:
        _check_the_experts(model_config, tp, ep)
    replicas = tp // config.parallel.attention_ranks
    is_cut = not config.parallel.dense_tp

    def serves(ranks: int) -> bool:
        return fits(model_config, ranks, ranks if ep > 1 else 1, replicas, is_cut)

    if serves(tp):
        return config
    counts = [
        n for n in range(replicas, replicas * model_config.num_heads + 1, replicas) if serves(n)
    ]
    among = "shares of prompts have" if config.parallel.cp > 1 else "replicas share"
    shares = f" ({replicas} {among} the heads by themselves)" if replicas > 1 else ""
    raise ConfigError(
        f"--tensor-parallel-size {tp}{shares} does not divide the model's "
        f"{model_config.num_heads:,} "
        f"attention heads, {model_config.num_kv_heads:,} KV heads and "
        f"{model_config.intermediate_size:,} MLP "
        "columns"
        + (f" ({model_config.experts.inner:,} of an expert)" if model_config.experts else "")
        + (
            f", or {model_config.state.units(model_config.hidden_size):,} parts of a state"
            if model_config.state
            else ""
        ),
        hint=f"choose one of: {', '.join(map(str, counts))}",
    )


def check_the_nodes(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    parallel = config.parallel
    if parallel.nodes == 1:
        if parallel.node:
            raise ConfigError(
                f"--node-rank {parallel.node} of one node", hint="name their number by --nnodes"
            )
        return config
    if parallel.node >= parallel.nodes:
        raise ConfigError(
            f"--node-rank {parallel.node} of {parallel.nodes} nodes",
            hint=f"number them 0 … {parallel.nodes - 1}",
        )
    if parallel.world % parallel.rank_nodes:
        raise ConfigError(
            f"{parallel.world} ranks cannot be spread evenly over {parallel.nodes} nodes",
            hint="choose a multiple",
        )
    if parallel.dp > 1 and not parallel.uses_dp_attention:
        raise ConfigError(
            "--data-parallel-size cannot be combined with --nnodes",
            hint="start a server on each machine, and a router before them; or join the replicas "
            "by --enable-dp-attention",
        )
    if parallel.by_ray and not parallel.meeting:
        return config  # Ray knows an address
    host, _, port = parallel.meeting.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65534:
        raise ConfigError(
            f"--nnodes {parallel.nodes} needs --dist-init-addr host:port, "
            f"got {printable(repr(parallel.meeting), 80)}",
            hint="name an address of node 0 that the others reach, and a free port",
        )
    return config


def let_ray_start_the_nodes(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Without --nnodes every rank beside the first is a node, wherever Ray has room."""
    parallel = config.parallel
    if not parallel.by_ray:
        return config
    if find_spec("ray") is None:
        raise ConfigError("--use-ray needs the package ray", hint="run: pip install 'banyan[ray]'")
    if parallel.node:
        raise ConfigError(
            f"--use-ray cannot be combined with --node-rank {parallel.node}",
            hint="start the first node alone: Ray starts the others",
        )
    if parallel.dp > 1:
        raise ConfigError(
            "--data-parallel-size cannot be combined with --use-ray",
            hint="start a server on each machine, and a router before them",
        )
    if parallel.world == 1:
        raise ConfigError(
            "--use-ray: there is one rank, and nothing for Ray to start",
            hint="raise --tp, --pp or --attn-cp-size, or leave it out",
        )
    if parallel.nodes > 1:
        return config
    return replace(config, parallel=replace(parallel, nodes=parallel.world, are_by_rank=True))


def fill_the_stages(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Every stage has a step of its own, and some wait before the first one."""
    pp, schedule = config.parallel.pp, config.schedule
    if pp == 1 or schedule.depth == 1:
        return config
    depth = pp + schedule.async_depth
    _log("steps in flight", depth, f"there are {pp} stages, and {schedule.async_depth} behind them")
    return replace(config, schedule=replace(schedule, depth=depth, token_gap=pp - 1))


def _check_the_stages(config: Config, model_config: ModelConfig) -> None:
    pp = config.parallel.pp
    if pp > model_config.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {pp}: the model has {model_config.num_layers} layers",
            hint=f"choose at most {model_config.num_layers}",
        )
    if model_config.is_encoder:
        raise ConfigError(
            f"--pipeline-parallel-size {pp}: encoders run in one stage",
            hint="use --tensor-parallel-size",
        )


def _check_the_experts(model_config: ModelConfig, tp: int, ep: int) -> None:
    if model_config.experts is None:
        raise ConfigError(
            f"--expert-parallel-size {ep}: this model has no experts",
            hint="use --tensor-parallel-size alone",
        )
    if ep != tp:
        raise ConfigError(
            f"--expert-parallel-size {ep} with --tensor-parallel-size {tp}: experts are shared out "
            "among all ranks or none",
            hint=f"choose 1 or {tp}",
        )
    if model_config.experts.count % ep:
        raise ConfigError(
            f"--expert-parallel-size {ep} does not divide the model's "
            f"{model_config.experts.count} experts",
            hint="leave it at 1, or choose a divisor for both",
        )


def sample_the_demo_as_its_makers_do(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """The demo's file has no place for its makers' sampling advice (SmolLM2 model card); left to
    itself it may also go on for its whole context."""
    server = config.server
    if config.model.source != DEMO or server.sampling_defaults != "model":
        return config
    if server.preferred_sampling:
        return config
    _log("preferred-sampling-params", dict(_DEMO_SAMPLING), "the demo's makers advise it")
    _log("the longest chat answer", _DEMO_CHAT_TOKENS, "the demo does not always come to an end")
    server = replace(server, preferred_sampling=dict(_DEMO_SAMPLING), chat_tokens=_DEMO_CHAT_TOKENS)
    return replace(config, server=server)


def ask_the_demo_plainly(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """The system line of the demo's own template costs it the easiest questions
    (docs/fidelity.md)."""
    if config.model.source != DEMO or config.server.chat_template:
        return config
    _log("chat-template", _DEMO_TEMPLATE, "the demo answers better without a system message")
    return replace(config, server=replace(config.server, chat_template=_DEMO_TEMPLATE))


def sample_as_the_makers_advise(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """A GGUF file has no place for its makers' sampling advice; the catalogue has."""
    server = config.server
    is_open = server.sampling_defaults == "model" and not server.preferred_sampling
    if model_config.format != "gguf" or model_config.pooling is not None or not is_open:
        return config
    entry = recognise(config.model.source, model_config.path)
    if entry is None or not entry.sampling:
        return config
    advised: dict[str, object] = dict(entry.sampling)
    _log("preferred-sampling-params", advised, f"the makers of {entry.name} advise it")
    return replace(config, server=replace(server, preferred_sampling=advised))


def choose_the_grammar_backend(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Looks for packages and imports none: that takes a second, at the first request."""
    grammar = config.grammar
    package = _GRAMMAR_PACKAGES.get(grammar.backend)
    if package and find_spec(package) is None:
        raise ConfigError(
            f"--grammar-backend {grammar.backend} needs the package {package}",
            hint=f"run: pip install {package}",
        )
    if grammar.backend:
        return config
    found = [name for name, package in _GRAMMAR_PACKAGES.items() if find_spec(package)]
    chosen, why = (found[0], "it is installed") if found else ("none", "no library is installed")
    _log("grammar-backend", chosen, why)
    return replace(config, grammar=replace(grammar, backend=chosen))


RULES = (
    name_the_model,
    find_the_tokenizer,
    check_the_journal,
    bound_the_context,
    match_the_format,
    check_the_quantization,
    check_the_torchao,
    check_the_chunk,
    bound_the_prompts,
    let_ray_start_the_nodes,
    check_dp_attention,
    check_the_context,
    check_the_dense_blocks,
    share_the_experts,
    check_the_ranks,
    fill_the_stages,
    check_the_nodes,
    sample_the_demo_as_its_makers_do,
    ask_the_demo_plainly,
    sample_as_the_makers_advise,
    choose_the_grammar_backend,
    check_the_states,
    check_the_eviction,
    check_the_store,
    check_the_handoff,
    check_the_bounds,
    *EXECUTION_RULES,
    plan_the_drafts,
    check_multi_step,
    plan_the_adapters,
    check_the_expert_flags,
)


def _log(name: str, value: object, why: str, level: int = logging.DEBUG) -> None:
    log.log(level, "set %s=%s because %s", name, value, why)
