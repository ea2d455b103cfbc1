"""From flags to a Config that can be served, for every way to start: serve, batch, bench, Engine,
and `banyan config`, which shows the outcome.

Looks up every name that a flag gives, then finds the model and resolves the rest. Loads no weights,
and no torch. A composition root: it imports several packages.
"""

import ast
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

from banyan.base.errors import ConfigError, ModelError
from banyan.base.install import install_command
from banyan.base.log import logger, printable
from banyan.base.os import check_system
from banyan.base.table import split_name
from banyan.chat_template.named_templates import fill_in_form, template_source
from banyan.config import resolve
from banyan.config.devices import facts_of
from banyan.config.env import Environment
from banyan.config.hooks import hook_specs
from banyan.config.observability import kv_events
from banyan.config.rules.cache import HOST
from banyan.config.schema import Config
from banyan.engine_client.request_log import metrics_observers_of
from banyan.grammar.base import BACKENDS
from banyan.hub.remote_instance import with_weights_of_seed
from banyan.media.preparation import check_media
from banyan.model_config.model_config import ModelConfig
from banyan.parsers.choice import NONE
from banyan.parsers.reasoning import REASONING_PARSERS
from banyan.parsers.tool_calls import TOOL_PARSERS
from banyan.requests.defaults import check_preferred
from banyan.runner.speculative import DRAFTERS
from banyan.server.admin.metrics import check_labels
from banyan.server.admin.traces import check_traces
from banyan.server.lifecycle import WARMUPS, named_warmups
from banyan.server.tool_servers.start import DEMO, addresses, named_servers

log = logger(__name__)


def prepare(config: Config, environment: Environment) -> tuple[Config, ModelConfig]:
    """The resolved Config, and the facts of its model.

    Raises:
        ConfigError, ModelError: named after the flag or the key of the checkpoint that is wrong.
    """
    config, model_config, _ = prepare_with_origins(config, environment)
    return config, model_config


def prepare_to_load(config: Config, environment: Environment) -> tuple[Config, ModelConfig]:
    """As `prepare`, with the weights that another server sends (--load-format remote_instance)."""
    return with_weights_of_seed(*prepare(config, environment))


def prepare_with_origins(
    config: Config, environment: Environment
) -> tuple[Config, ModelConfig, dict[str, str]]:
    """As `prepare`, with the name of the rule that set each schema field."""
    check_system()
    check_names(config)
    if check_start := facts_of(config).check_start:
        check_start(config, "", environment)  # before a model is fetched for nothing
        found = resolve.prepare(config, environment)
        check_start(config, found[1].path, environment)
        return found
    found = resolve.prepare(config, environment)
    speculative = found[0].speculative
    has_words = (
        speculative.draft_path and not speculative.is_trained
    )  # it uses the target's vocabulary
    if has_words and not found[0].server.skip_tokenizer:
        _check_the_words(found[0])
    return found


def _check_the_words(config: Config) -> None:
    """Refuse a draft model whose vocabulary differs from the target model's."""
    from banyan.tokenizer.load import load_tokenizer

    name = f"--speculative-draft-model-path {printable(config.speculative.draft_source)}"
    mine = load_tokenizer(config.model.tokenizer_path)
    try:
        its = load_tokenizer(config.speculative.draft_path)
    except ModelError as error:
        log.warning("%s: its words are not compared with the model's: %s", name, error.text)
        return
    both = range(min(mine.vocab_size, its.vocab_size))
    here, there = mine.pieces, its.pieces
    other = next((token for token in both if here[token] != there[token]), None)
    if other is not None:
        raise ConfigError(
            f"{name} has other words than the served model, the first of them token {other:,}",
            hint="name a smaller model of the same family",
        )


def check_names(config: Config) -> None:
    """Refuse a name that nothing has, before anything is fetched or loaded."""
    server = config.server
    _check("--tool-call-parser", server.tool_parser, ("auto", NONE, *TOOL_PARSERS))
    _check("--reasoning-parser", server.reasoning_parser, ("auto", NONE, *REASONING_PARSERS))
    if config.grammar.backend:
        _check("--grammar-backend", config.grammar.backend, (*BACKENDS, NONE))
    if config.cache.store not in ("", HOST):
        from banyan.kv_transfer.store import STORES  # imports numpy

        _check("--hicache-storage-backend", config.cache.store, STORES)
    if config.speculative.algorithm:
        _check("--speculative-algorithm", config.speculative.algorithm, DRAFTERS)
    for name in named_warmups(config):
        _check("--warmups", name, tuple(WARMUPS))
    for name in named_servers(server.tool_servers):
        if name != DEMO:
            addresses(name)
            if find_spec("mcp") is None:
                raise ConfigError(
                    f"--tool-server {name} needs the package mcp",
                    hint=f"run: {install_command('tools')}",
                )
    if server.grpc_mode and find_spec("smg_grpc_proto") is None:
        raise ConfigError(
            "--grpc-mode needs the package smg-grpc-proto",
            hint=f"run: {install_command('grpc')}",
        )
    metrics_observers_of(config.observe)
    check_labels(config.observe)
    check_traces(config.observe)
    kv_events(config.observe)
    template_source(server.chat_template)
    fill_in_form(server.completion_template)
    for name in config.model.loader_functions:
        _check_function("--custom-weight-loader", name)
    for spec in hook_specs(config.model.hooks):
        _check_function("--forward-hooks", spec.factory)
    if config.observe.sigquit_handler:
        _check_function("--custom-sigquit-handler", config.observe.sigquit_handler)
    check_preferred(server)
    check_media(config.media)


def _check(flag: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ConfigError(
            f"{flag} {printable(name, 60)!r} is unknown", hint=f"choose one of: {', '.join(known)}"
        )


def _check_function(flag: str, name: str) -> None:
    """Refuse a function that is not there; nothing of its module is run to find out."""
    module, function = split_name(name)
    spec = _locate(module)
    if spec is None:
        raise ConfigError(
            f"{flag} {printable(name)}: there is no module {printable(module)!r}",
            hint="name it module:function, with the module on the Python path",
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled: only its import can show it
    with open(spec.origin, "rb") as file:
        names = _top_names(file.read())
    if function not in names and "*" not in names:
        raise ConfigError(
            f"{flag} {printable(name)}: {module} has no function {printable(function)!r}",
            hint="name it module:function",
        )


def _locate(module: str) -> ModuleSpec | None:
    """Where `module` lies; `find_spec` would import the packages around it."""
    path = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        found = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _top_names(source: bytes) -> set[str]:
    """What a module's own lines name; "*" where it takes all of another."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {"*"}  # the import says it better
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
