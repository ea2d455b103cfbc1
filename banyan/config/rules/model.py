"""Rules about the model: name, tokenizer, context length, quantization, demo, structured output."""

import os
import re
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.devices import rounded_methods
from banyan.config.env import Environment
from banyan.config.schema import DEMO, REMOTE_INSTANCE, Config
from banyan.hub.catalogue import recognise
from banyan.hub.remote_instance import seed_ports
from banyan.model_config.model_config import ModelConfig
from banyan.model_config.quantization import FLOAT_FORMS, SPELLINGS, spellings

log = logger(__name__)

_GRAMMAR_PACKAGES = MappingProxyType(
    {"xgrammar": "xgrammar", "llguidance": "llguidance", "outlines": "outlines_core"}
)
"""Backend -> required package, in order of preference."""


_MANY_READERS, _READERS = _LOADER_KEYS = ("enable_multithread_load", "num_threads")
_DEFAULT_READERS, _MOST_READERS = 8, 64


_DEMO_SAMPLING = MappingProxyType({"temperature": 0.2, "top_p": 0.9})


_DEMO_TEMPLATE = "chatml"


_DEMO_CHAT_TOKENS = 1024


def choose_served_name(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    if config.model.served_name:
        return config
    log.debug(
        "set %s=%s because %s",
        "served-model-name",
        config.model.source,
        "that is the name of the source",
    )
    return replace(config, model=replace(config.model, served_name=config.model.source))


def find_tokenizer(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    path = config.model.tokenizer_path
    if path and not os.path.exists(path):
        raise ConfigError(
            f"--tokenizer-path {path!r} does not exist",
            hint="use a path on this machine",
        )
    return replace(config, model=replace(config.model, tokenizer_path=path or model_config.path))


def check_journal(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    path = config.observe.journal
    folder = os.path.dirname(os.path.abspath(path))
    if path and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"--journal {path!r}: {folder!r} is not a writable folder",
            hint="choose a file in another folder",
        )
    return config


def limit_context(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    wanted, why = config.model.context_length, model_config.context_limit
    if why:
        log.warning(
            "the longest request has %d tokens, fewer than the model was trained for: %s",
            model_config.context_length,
            why,
        )
        if wanted > model_config.context_length:
            raise ConfigError(
                f"--context-length {wanted:,} is more than {model_config.context_length:,}: {why}",
                hint="lower it, or leave it out",
            )
    if wanted > model_config.context_length and not environment.allow_longer_context:
        raise ConfigError(
            f"--context-length {wanted:,} is more than the model's "
            f"{model_config.context_length:,} tokens",
            hint="lower it, or set BANYAN_ALLOW_LONGER_CONTEXT=1 if the model supports it",
        )
    if wanted:
        return config
    log.debug(
        "set %s=%s because %s",
        "context-length",
        model_config.context_length,
        "the model was trained for it",
    )
    return replace(config, model=replace(config.model, context_length=model_config.context_length))


def choose_load_format(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    model = config.model
    if model.load_format == "auto":
        return replace(config, model=replace(model, load_format=model_config.format))
    if model.load_format == REMOTE_INSTANCE:
        flag, are_pushed = "--remote-instance-weight-loader-", model.seed_backend == "nccl"
        missing = {
            "seed-instance-ip": not model.seed_host,
            "seed-instance-service-port": not model.seed_port,
            "send-weights-group-ports": are_pushed and not model.seed_ports,
        }
        for name, is_missing in missing.items():
            if is_missing:
                raise ConfigError(
                    f"--load-format {REMOTE_INSTANCE} needs {flag}{name}",
                    hint="name the running server, and with the backend nccl ports that it opens",
                )
        if are_pushed:
            seed_ports(model)
    return config


def choose_loader_threads(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Read --model-loader-extra-config; an unknown key is an error."""
    given, flag = config.model.loader_options, "--model-loader-extra-config"
    for key, value in given.items():
        if key not in _LOADER_KEYS:
            raise ConfigError(
                f"{flag}: nothing reads {printable(str(key), 40)!r}",
                hint=f"it takes {' and '.join(_LOADER_KEYS)}",
            )
        if key == _MANY_READERS and not isinstance(value, bool):
            shown = printable(repr(value), 40)
            raise ConfigError(f"{flag}: {key} must be true or false, got {shown}")
    threads = given.get(_READERS, _DEFAULT_READERS)
    if type(threads) is not int or not 1 <= threads <= _MOST_READERS:
        raise ConfigError(
            f"{flag}: {_READERS} must be a whole number in [1, {_MOST_READERS}], got "
            f"{printable(repr(threads), 40)}"
        )
    if not given.get(_MANY_READERS, False):
        return config
    if config.model.load_format == "dummy":
        log.info("%s has no effect: --load-format dummy reads no files", flag)
        return config
    return replace(config, model=replace(config.model, loader_threads=threads))


def check_quantization(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Resolve --quantization to a method of this server, or to "" for the checkpoint's own."""
    wanted = config.model.quantization
    if wanted == "unquant":
        return replace(config, model=replace(config.model, quantization=""))
    if wanted == "gguf":
        if model_config.format != "gguf":
            raise ConfigError(
                f"--quantization gguf: {config.model.source!r} is {model_config.format}",
                hint="leave the flag out, or use a .gguf file",
            )
        return replace(config, model=replace(config.model, quantization=""))
    is_float = model_config.quant is None and model_config.stores_floats
    if is_float and wanted in rounded_methods(config, environment):
        return config
    if wanted in spellings():
        if model_config.quant is None or wanted not in SPELLINGS.get(model_config.quant.method, ()):
            is_now = (
                f"{model_config.quant.method}"
                if model_config.quant is not None
                else model_config.dtype
            )
            raise ConfigError(
                f"--quantization {wanted} is not available for {config.model.source!r}: its "
                f"weights are {is_now}, and cannot be converted to {wanted}",
                hint="leave the flag out; float weights can be quantized to int8, q8_0, q4_0 and "
                "q4_1, or to fp8 by --torchao-config fp8wo or on CUDA devices",
            )
        if wanted != model_config.quant.method:
            log.info(
                "--quantization %s: reading the weights as %s, the method of the checkpoint",
                wanted,
                model_config.quant.method,
            )
        return replace(config, model=replace(config.model, quantization=""))
    if wanted and model_config.quant is not None and model_config.quant.method not in FLOAT_FORMS:
        raise ConfigError(
            f"--quantization {wanted}: the weights of {config.model.source!r} are "
            f"{model_config.quant.method} already; only float weights can be quantized",
            hint="leave the flag out, or use a checkpoint with float weights",
        )
    if wanted and not model_config.stores_floats:
        raise ConfigError(
            f"--quantization {wanted}: the weights of {config.model.source!r} are "
            f"{model_config.dtype} already; only float weights can be quantized",
            hint="leave the flag out, or use a checkpoint with float weights",
        )
    return config


def check_torchao(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    model = config.model
    if not model.torchao:
        return config
    flag = f"--torchao-config {model.torchao}"
    if model_config.quant is not None or not model_config.stores_floats:
        is_now = model_config.dtype if model_config.quant is None else model_config.quant.method
        raise ConfigError(
            f"{flag}: the weights of {model.source!r} are {is_now} already; only float weights "
            "can be quantized",
            hint="leave the flag out, or use a checkpoint with float weights",
        )
    return config


def use_demo_sampling(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Use the sampling parameters that the SmolLM2 model card recommends; its GGUF file has none.

    Chat answers get a length limit, because the demo may not stop by itself."""
    server = config.server
    if config.model.source != DEMO or server.sampling_defaults != "model":
        return config
    if server.preferred_sampling:
        return config
    log.debug(
        "set %s=%s because %s",
        "preferred-sampling-params",
        dict(_DEMO_SAMPLING),
        "its model card recommends them",
    )
    log.debug(
        "set %s=%s because %s",
        "the length limit of chat answers",
        _DEMO_CHAT_TOKENS,
        "the demo does not always stop by itself",
    )
    server = replace(server, preferred_sampling=dict(_DEMO_SAMPLING), chat_tokens=_DEMO_CHAT_TOKENS)
    return replace(config, server=server)


def use_plain_demo_template(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Use a template without a system message: with its own one the demo fails easy questions
    (docs/fidelity.md)."""
    if config.model.source != DEMO or config.server.chat_template:
        return config
    log.debug(
        "set %s=%s because %s",
        "chat-template",
        _DEMO_TEMPLATE,
        "the demo answers better without a system message",
    )
    return replace(config, server=replace(config.server, chat_template=_DEMO_TEMPLATE))


def use_recommended_sampling(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Take recommended sampling parameters from the catalogue; GGUF files contain none."""
    server = config.server
    is_open = server.sampling_defaults == "model" and not server.preferred_sampling
    if model_config.format != "gguf" or model_config.pooling is not None or not is_open:
        return config
    entry = recognise(config.model.source, model_config.path)
    if entry is None or not entry.sampling:
        return config
    advised: dict[str, object] = dict(entry.sampling)
    log.debug(
        "set %s=%s because %s",
        "preferred-sampling-params",
        advised,
        f"the authors of {entry.name} recommend them",
    )
    return replace(config, server=replace(server, preferred_sampling=advised))


def choose_grammar_backend(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Choose an installed library without importing it: the import takes a second, and the first
    request does it."""
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
    log.debug("set %s=%s because %s", "grammar-backend", chosen, why)
    return replace(config, grammar=replace(grammar, backend=chosen))


def check_score_delimiter(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    given = config.server.score_delimiter
    if given >= model_config.vocab_size:
        raise ConfigError(
            f"--multi-item-scoring-delimiter {given}: the model's tokens are 0 to "
            f"{model_config.vocab_size - 1}"
        )
    return config


def check_json_white_space(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Refuse a pattern that is not a regex. Whether the backend supports it is checked later."""
    pattern = config.grammar.whitespace
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"--constrained-json-whitespace-pattern {printable(repr(pattern), 80)} is not a regex: "
            f"{error}"
        ) from None
    return config
