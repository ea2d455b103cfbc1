"""From a started engine process to a Service, and what is printed about it when it is ready."""

import asyncio
import json
import os
import time
from collections.abc import Mapping

from banyan.base.log import logger
from banyan.config.card import ModelCard
from banyan.config.schema import Config, ServerConfig
from banyan.frontend.chat import Chat, load_chat
from banyan.frontend.client import Engines
from banyan.frontend.settings import limits_of, sampling_defaults, seed_source
from banyan.frontend.text_generator import open_generator
from banyan.frontend.tokenizer import Tokenizer, load_tokenizer
from banyan.messages.events import Ready
from banyan.server.health import generate_one
from banyan.server.state import ServerState, Service

log = logger(__name__)

READY_LINE = "The server is fired up and ready to roll!"
"""Scripts wait for this line."""

_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


async def open_service(state: ServerState, card: ModelCard, client: Engines) -> Service:
    """Load the tokenizer while the engine loads the model, then warm up.

    Raises:
        BanyanError: the engine died, or the tokenizer or template is refused.
    """
    config = state.config
    began_s = time.monotonic()
    loading = asyncio.create_task(asyncio.to_thread(_load_words, config))
    try:
        ready = await client.ready()
        tokenizer, chat = await loading
    finally:
        loading.cancel()
    state.phases |= _engine_phases(ready, time.monotonic() - began_s)
    limits = limits_of(config, card, ready, tokenizer)
    defaults = sampling_defaults(config.server)
    recommended = _model_defaults(config, card)
    service = Service(
        card=card,
        ready=ready,
        client=client,
        generator=open_generator(client, tokenizer, limits, config.observe.log_requests),
        limits=limits,
        tokenizer=tokenizer,
        chat=chat,
        native_defaults=defaults,
        chat_defaults={**defaults, **recommended, **config.server.preferred_sampling},
        draw_seed=seed_source(config.server),
    )
    if not config.server.skip_warmup:
        warm_s = time.monotonic()
        await generate_one(service)
        state.phases["warm-up"] = time.monotonic() - warm_s
    return service


def _load_words(config: Config) -> tuple[Tokenizer | None, Chat | None]:
    if config.server.skip_tokenizer:
        return None, None
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    source = _template_source(config.server)
    if source is None and tokenizer.chat_template is None:
        return tokenizer, None
    return tokenizer, load_chat(tokenizer, source)


def _template_source(server: ServerConfig) -> str | None:
    """The template that the user named: a file, or its text."""
    given = server.chat_template
    if not given:
        return None
    if os.path.exists(given):
        with open(given, encoding="utf-8") as file:
            return file.read()
    return given


def _model_defaults(config: Config, card: ModelCard) -> dict[str, object]:
    """Sampling parameters that the model's generation_config.json recommends for chat."""
    file = os.path.join(card.path, "generation_config.json")
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


def _engine_phases(ready: Ready, waited_s: float) -> dict[str, float]:
    """The engine's own phases, and what the wait for it took besides."""
    phases = json.loads(ready.facts).get("phases", {})
    own = {f"engine: {name}": float(seconds) for name, seconds in phases.items()}
    return {"engine process": max(0.0, waited_s - sum(own.values())), **own}


def report(state: ServerState, service: Service, address: str) -> None:
    """Print the start-up waterfall, the engine's facts, and how to call the server."""
    facts: Mapping[str, object] = json.loads(service.ready.facts)
    total_s = sum(state.phases.values())
    lines = [f"start-up took {total_s:.2f} s:"]
    lines += [f"  {seconds:8.2f} s  {name}" for name, seconds in state.phases.items()]
    for name, value in facts.items():
        if name != "phases":
            lines += [f"{name}:", *_table(value)]
    for line in lines:
        log.info("%s", line)
    log.info("%s", READY_LINE)
    log.info("listening on %s", address)
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
    log.info("try: %s", curl(address, body, bool(state.config.server.api_key)))


def _table(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [f"  {name} = {item}" for name, item in value.items()]
    return [f"  {line}" for line in str(value).splitlines()]


def curl(address: str, body: str, needs_key: bool) -> str:
    key = " -H 'Authorization: Bearer '$BANYAN_API_KEY" if needs_key else ""
    kind = " -H 'Content-Type: application/json'"
    return f"curl {address}/v1/chat/completions{kind}{key} -d '{body}'"
