"""From a started engine process to a Service: load the tokenizer, warm up, log the facts.

A warm-up sends the engine a request of a kind that takes longer the first time (--warmups).
Installed packages add warm-ups as entry points of the group `banyan.warmups`.
"""

import asyncio
import gc
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from banyan.base.errors import ConfigError
from banyan.base.ids import RequestId, fresh_id
from banyan.base.log import logger
from banyan.base.memory import give_back, let_go
from banyan.base.thread_pool import use_threads
from banyan.chat_template.named_templates import FillIn, fill_in_form, template_source
from banyan.chat_template.template import Chat, load_chat
from banyan.config.defaults import with_settings
from banyan.config.delete_checkpoint import delete_weight_files
from banyan.config.hooks import read_prompt
from banyan.config.schema import DEMO, DEMO_LINE, Config
from banyan.engine_client.client import Replicas
from banyan.engine_client.data_parallel import LoadHistory
from banyan.engine_client.metrics_observer import MetricsObserver
from banyan.engine_client.request_log import WITH_BEGINNINGS, Recent, metrics_observers_of
from banyan.engine_client.text_generator import open_generator
from banyan.hub.remote_instance import SeedFiles
from banyan.messages.events import Ready
from banyan.messages.requests import REGEX, Constraint
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.model_config import ModelConfig
from banyan.parsers.choice import NONE, Parsers, choose_parsers
from banyan.requests.defaults import limits_of, open_media, sampling_defaults, seed_source
from banyan.requests.generation import collect
from banyan.requests.request_spec import spec_of
from banyan.server.admin.health import generate_one
from banyan.server.admin.metrics import open_labels, open_metrics
from banyan.server.admin.traces import open_traces
from banyan.server.lifecycle import WARMUPS, named_warmups
from banyan.server.state import ServerState, Service
from banyan.tokenizer.load import open_tokenizer
from banyan.tokenizer.tokenizer import Tokenizer

log = logger(__name__)

MIB, GIB = 1 << 20, 1 << 30

READY_LINE = "The server is fired up and ready to roll!"
"""Scripts wait for this line."""

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class _TextParts:
    """Tokenizer, chat template and parsers."""

    tokenizer: Tokenizer | None = None
    chat: Chat | None = None
    parsers: Parsers = field(default_factory=Parsers)
    fill_in: FillIn | None = None


async def open_service(state: ServerState, model_config: ModelConfig, client: Replicas) -> Service:
    """Load the tokenizer while the engine loads the model, then warm up.

    Raises:
        BanyanError: the engine died, or the tokenizer or template is refused.
    """
    config = state.config
    use_threads(config.server.waiting_texts)
    loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, config))
    try:
        ready, text = await asyncio.gather(_engine_ready(state, client), loading)
    finally:
        loading.cancel()
    end_phase(state.phases, "tokenizer")
    config = state.config = _settled(config, json.loads(ready.facts).get("settings", {}))
    limits = limits_of(config, model_config, ready, text.tokenizer)
    defaults = sampling_defaults(config.server)
    recommended = _model_defaults(config, model_config)
    labels = open_labels(config.observe)
    state.labels = None if labels is None else labels.context
    state.metrics = open_metrics(config, state.served_name, client.replicas, labels)
    if config.observe.dumps:
        state.recent = Recent(Path(config.observe.dumps))
    state.traces = open_traces(config.observe, state.served_name, state.version)
    watch = None if state.traces is None else state.traces.watch
    ended = None if config.server.disable_console else state.ended
    metrics_observers: list[MetricsObserver] = [
        observer for observer in (state.metrics, state.recent, ended) if observer is not None
    ]
    service = Service(
        model_config=model_config,
        ready=ready,
        client=client,
        generator=open_generator(
            client,
            text.tokenizer,
            limits,
            config.observe,
            metrics_observers,
            state.keys.weight_of,
            watch,
        ),
        limits=limits,
        tokenizer=text.tokenizer,
        chat=text.chat,
        parsers=text.parsers,
        media=open_media(config, model_config, text.tokenizer, limits),
        fill_in=text.fill_in,
        native_defaults=defaults,
        chat_defaults={
            **defaults,
            "max_new_tokens": config.server.chat_tokens or None,
            **recommended,
            **config.server.preferred_sampling,
        },
        draw_seed=seed_source(config.server),
        metrics_observers=(*metrics_observers, *metrics_observers_of(config.observe)),
    )
    await warm_up(service, config)
    end_phase(state.phases, "warm-up")
    if config.model.load_format != "dummy" and not config.model.deletes:
        state.seed_files = SeedFiles(model_config.path)
    delete_weight_files(config, model_config)
    let_go()
    if ended is not None:
        state.history = LoadHistory(config.cache.page_size)
        state.history.start(client.replicas)
    return service


def _settled(config: Config, settings: Mapping[str, object]) -> Config:
    """`config` with the settings that the engine chose for the device, and their origin."""
    config = with_settings(config, settings)
    chosen = dict.fromkeys(settings, f"device {config.device.name}")
    origins = {**config.observe.origins, **chosen}
    return replace(config, observe=replace(config.observe, origins=origins))


def _load_tokenizer(config: Config) -> _TextParts:
    server = config.server
    if server.skip_tokenizer:
        return _TextParts()
    tokenizer = open_tokenizer(config.model.tokenizer_path or config.model.path, server)
    gc.collect()  # free lists of small tuples would keep whole arenas from being returned
    give_back()  # reading a vocabulary needs several times the memory that it keeps
    source = template_source(server.chat_template)
    chat = None
    if source is not None or tokenizer.facts.chat_template is not None:
        chat = load_chat(tokenizer, source)
    template = chat.template.source if chat else ""
    takes_tools = chat is None or chat.template.takes_tools
    parsers = choose_parsers(server.tool_parser, server.reasoning_parser, template, takes_tools)
    return _TextParts(tokenizer, chat, parsers, fill_in_form(server.completion_template))


def _model_defaults(config: Config, model_config: ModelConfig) -> dict[str, object]:
    """Sampling parameters that the model's generation_config.json recommends for chat."""
    file = os.path.join(model_config.path, "generation_config.json")
    if config.server.sampling_defaults != "model" or not os.path.isfile(file):
        return {}
    with open(file, encoding="utf-8") as opened:
        given = json.load(opened)
    found = {n: given[n] for n in _MODEL_DEFAULTS if given.get(n) is not None}
    if found.get("top_k") == 0:
        found["top_k"] = -1  # transformers writes "all" as 0
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


async def _engine_ready(state: ServerState, client: Replicas) -> Ready:
    """Wait for the engine, and add its start-up phases to `state.phases`."""
    ready = await client.ready()
    own = json.loads(ready.facts).get("phases", {})
    waited_s = process_age_s() - sum(state.phases.values())
    state.phases["engine process"] = max(0.0, waited_s - sum(own.values()))
    state.phases |= {f"engine: {name}": float(seconds) for name, seconds in own.items()}
    return ready


async def warm_up(service: Service, config: Config) -> None:
    """Run the chosen warm-ups; RequestError if one fails."""
    if config.model.dump_input:
        await _run_dump_input(service, config)
    if not config.server.skip_warmup:
        await generate_one(service)
    for name in named_warmups(config):
        await WARMUPS.load(name)(service, config)
        log.info("warm-up done name=%s", name)


async def _run_dump_input(service: Service, config: Config) -> None:
    """Run the prompt of --debug-tensor-dump-input-file in one step.

    It is the first request, so that no token of it is cached.
    """
    prompt, chunk = read_prompt(config.model.dump_input), config.schedule.chunk_tokens
    if 0 < chunk < len(prompt):
        raise ConfigError(
            f"--debug-tensor-dump-input-file has {len(prompt)} tokens, and a step takes {chunk}",
            hint="raise --chunked-prefill-size",
        )
    await _generate(service, prompt)


async def fill_a_step(service: Service, config: Config) -> None:
    """Send a prompt that fills a step, or the longest one that the model allows."""
    schedule, limits = config.schedule, service.limits
    step = schedule.chunk_tokens if schedule.chunk_tokens > 0 else schedule.prefill_tokens
    longest = min(limits.context_length, limits.max_request_tokens or limits.context_length) - 1
    await _generate(service, [0] * max(1, min(step, longest)))


async def compile_a_constraint(service: Service, config: Config) -> None:
    """Start the process that compiles constraints; it reads the vocabulary."""
    await _generate(service, [0], Constraint(REGEX, "[0-9]").encode())


async def _generate(service: Service, prompt: list[int], grammar: str = "") -> None:
    pool = service.limits.is_embedding
    sampling = SamplingParams(max_new_tokens=0 if pool else 1, temperature=0.0)
    id = RequestId(f"warm-up-{fresh_id()}")
    request = spec_of(id, prompt, sampling, grammar=grammar, pool=pool, route="warm-up")
    await collect(service.generator, [request])


def end_phase(phases: dict[str, float], name: str) -> None:
    """End a start-up phase. It began at the end of the previous one, the first with the process."""
    phases[name] = max(0.0, process_age_s() - sum(phases.values()))


def process_age_s() -> float:
    """Seconds since this process was started (Linux: proc(5), field 22 of stat)."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def report(state: ServerState, service: Service, addresses: Sequence[str]) -> None:
    """Log the model, the capacity and the addresses; at debug level also the start-up phases and
    the facts of the engine, which /server_info shows too."""
    facts: dict[str, Any] = json.loads(service.ready.facts)
    for line in _details(state, service, facts):
        log.debug("%s", line)
    for line in _summary(state.config, service, facts):
        log.info("%s", line)
    observe = state.config.observe
    if observe.log_requests and observe.log_detail >= WITH_BEGINNINGS:
        log.info(
            "lines of --log-requests hold texts of requests; --log-requests-level 1 leaves them out"
        )
    if state.config.model.source == DEMO:
        log.info("%s", DEMO_LINE)
    log.info("start-up took %.2f s", process_age_s())
    log.info("%s", READY_LINE)
    log.info("listening on %s", " and ".join(addresses))
    if web := [address for address in addresses if address.startswith("http")]:
        log.info("try: %s", curl(web[0], service, state.config.server.has_keys))


def _summary(config: Config, service: Service, facts: Mapping[str, Any]) -> list[str]:
    """The model, and the capacity for requests."""
    memory, ready = facts.get("memory", {}), service.ready
    weights = f"{memory.get('weight_bytes', 0) / MIB:,.1f} MiB of weights"
    cache = f"{config.parallel.dp * memory.get('cache_bytes', 0) / GIB:,.1f} GiB"
    where = f"{config.model.activation_dtype} on {config.device.name}"
    parsers, found = service.parsers, []
    if parsers.tool_name != NONE:
        found.append(f"tool calls as {parsers.tool_name}")
    if parsers.reasoning_name != NONE:
        found.append(f"reasoning as {parsers.reasoning_name}")
    if service.tool_tag is not None:
        found.append("tools shown as text, because the chat template has no place for them")
    return [
        f"model {config.model.served_name}: {weights}, {where}, steps {facts.get('steps', '')}, "
        + ", ".join([f"context of {service.limits.context_length:,} tokens", *found]),
        f"KV cache: {ready.max_total_tokens:,} tokens in {cache}, at most {ready.max_running} "
        "requests at once",
    ]


def _details(state: ServerState, service: Service, facts: Mapping[str, object]) -> list[str]:
    lines = [f"{seconds:8.2f} s  {name}" for name, seconds in state.phases.items()]
    for name, value in facts.items():
        if name != "phases":
            lines += [f"{name}:", *_table(value)]
    parsers = service.parsers
    lines.append(f"parsers: tool calls = {parsers.tool_name}, reasoning = {parsers.reasoning_name}")
    return lines


def _table(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [f"  {name} = {item}" for name, item in value.items()]
    return [f"  {line}" for line in str(value).splitlines()]


def curl(address: str, service: Service, needs_key: bool) -> str:
    """A first request that this model answers."""
    route, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    if service.limits.is_embedding:
        route = "/classify" if service.model_config.labels else "/v1/embeddings"
        body = {"input": "Hello"}
    elif service.chat is None and service.tokenizer is not None:
        route, body = "/v1/completions", {"prompt": "Hello"}
    elif service.tokenizer is None:
        route, body = "/generate", {"input_ids": [1]}
    key = " -H 'Authorization: Bearer '$BANYAN_API_KEY" if needs_key else ""
    kind = " -H 'Content-Type: application/json'"
    return f"curl {address}{route}{kind}{key} -d '{json.dumps(body)}'"
