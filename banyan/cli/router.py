"""`banyan router`, `banyan lb`, and `banyan serve` with several models: flags to RouterConfig,
servers to start, then the router.

A flag of the router may have the prefix --router-, for lines that also start servers. Flags that
are not the router's are passed to the servers it starts; if it starts none, they are errors.
"""

import asyncio
import difflib
import json
import sys
import textwrap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from banyan.base.child_process import Child, spawn
from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import log_always, logger, printable, start_logging, wrap_standard_error
from banyan.base.os import check_system
from banyan.cli.client import free_port
from banyan.config.argv import read_mapping
from banyan.config.cli import parse
from banyan.config.env import Environment, for_downloads, forget_secrets, read_environment
from banyan.config.flags.flag import COMMAS, LISTS, SWITCH, Flag
from banyan.config.schema import ServerConfig
from banyan.hub.catalogue import find
from banyan.platform import open_platform
from banyan.router.config import (
    DECODE,
    HUB,
    PLAIN,
    PREFILL,
    LimitConfig,
    PolicyConfig,
    PoolConfig,
    RouterConfig,
    WorkerSpec,
)
from banyan.router.flags import GROUPS, IDLE, REFUSED
from banyan.router.models import NamedModel
from banyan.router.upstream import checked_url

_PREFIX = "router-"
_REPEATED = ("prefill", "decode")
"""Flags that may be given several times."""
_MILLISECONDS = ("retry.first_pause_s", "retry.longest_pause_s")
_MODEL = ("--model-path", "--model", "--config")
"""Flags that name the servers to start."""
_WORKER_FIELDS = ("pool.urls", "pool.prefill", "pool.decode", "pool.ports")
"""Flag values from which worker specs are built."""


@dataclass
class _ParsedFlags:
    values: dict[str, object] = field(default_factory=dict[str, object])
    notes: list[str] = field(default_factory=list[str])
    server_words: list[str] = field(default_factory=list[str])
    """Words for the servers that the router starts."""


def read_flags(
    argv: Sequence[str],
    variables: Mapping[str, str],
    check_servers: Callable[[Sequence[str]], None],
    defaults: RouterConfig | None = None,
) -> RouterConfig:
    """Parse flags and variables.

    Args:
        variables: flag name -> text, from BANYAN_<FLAG>.
        check_servers: raises ConfigError if servers cannot be started with these words.

    Raises:
        ConfigError: an unknown or refused flag, an illegal value, or incompatible flags.
    """
    known = {name: flag for _, flags in GROUPS for flag in flags for name in flag.names}
    reading = _ParsedFlags()
    for name, text in variables.items():
        if name in known and text and name != "dp-size":
            flag = known[name]
            words = text.split() if flag.kind in LISTS else [text]
            reading.values[flag.field] = flag.from_words(words, f"BANYAN_{name}")
    for spelled, name, words in _split(argv, known):
        _take(spelled, name, words, known, reading)
    config = _build_config(reading, defaults or RouterConfig())
    if config.pool.start:
        check_servers(config.pool.start)
    return config


def help_text() -> str:
    lines: list[str] = []
    for title, flags in GROUPS:
        lines += ["", f"{title}:"]
        for flag in flags:
            names = ", ".join(f"--{n}" for n in (flag.name, *flag.aliases))
            lines += textwrap.wrap(f"  {names} {flag.metavar.replace('|', ' | ')}", 98)
            line = f"      {flag.help}{_default_text(flag)}"
            lines += textwrap.wrap(line, 98, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _default_text(flag: Flag) -> str:
    if flag.field in _WORKER_FIELDS or flag.kind == SWITCH or "default:" in flag.help:
        return ""
    part, _, name = flag.field.partition(".")
    default: object = getattr(getattr(RouterConfig(), part), name)
    if flag.field in _MILLISECONDS and isinstance(default, float):
        default *= 1000
    return "" if default in ("", (), 0) else f" [{default}]"


def _split(argv: Sequence[str], known: Mapping[str, Flag]) -> Iterator[tuple[str, str, list[str]]]:
    """(as spelled, plain name, the words that follow) of every flag; ("", "", words) of others."""
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--"):
            yield "", "", [word]
            continue
        spelled, equals, text = word.partition("=")
        name = spelled.removeprefix("--").replace("_", "-")
        if name not in REFUSED and name.removeprefix(_PREFIX) in {**known, **IDLE, **REFUSED}:
            name = name.removeprefix(_PREFIX)
        words = [text] if equals else []
        while not equals and at < len(argv) and not argv[at].startswith("--"):
            if not _takes_more(known.get(name), words, argv[at]):
                break
            words.append(argv[at])
            at += 1
        yield spelled, name, words


def _takes_more(flag: Flag | None, words: Sequence[str], word: str) -> bool:
    if flag is None:
        return True
    if flag.kind == SWITCH:
        return not words and flag.takes(word)
    return not words or flag.kind in (*LISTS, COMMAS)


def _take(
    spelled: str, name: str, words: list[str], known: Mapping[str, Flag], reading: _ParsedFlags
) -> None:
    if name in REFUSED:
        why = REFUSED[name]
        raise ConfigError(f"{spelled} is not available in this build: {why}")
    if name in IDLE:
        reading.notes.append(f"{spelled} is accepted but has no effect: {IDLE[name]}")
        return
    if name not in known:
        reading.server_words += [spelled, *words] if spelled else words
        return
    flag = known[name]
    value = flag.check(words, spelled) if len(words) > 1 else flag.from_words(words, spelled)
    if name in _REPEATED:
        before = reading.values.get(flag.field, ())
        assert isinstance(before, tuple) and isinstance(value, tuple)
        value = (*before, *value)
    reading.values[flag.field] = value


def _build_config(reading: _ParsedFlags, defaults: RouterConfig) -> RouterConfig:
    values = reading.values
    for name in _MILLISECONDS:
        if isinstance(pause := values.get(name), float):
            values[name] = pause / 1000
    if "prometheus.port" in values:
        values["observe.metrics"] = True
    workers = _workers(values)
    config = defaults
    for part in fields(RouterConfig):
        own = {
            name.partition(".")[2]: value
            for name, value in values.items()
            if name.partition(".")[0] == part.name and name not in _WORKER_FIELDS
        }
        if own:
            config = replace(config, **{part.name: replace(getattr(config, part.name), **own)})
    pool = replace(config.pool, workers=workers)
    if config.models.is_on:
        _check_models(config, workers)
        pool = replace(pool, by_model=True, start=tuple(reading.server_words))
    else:
        pool = replace(pool, **_start(reading.server_words, pool.count, workers))
    config = replace(config, pool=pool)
    _check(config)
    notes = (*config.observe.notes, *reading.notes)
    return replace(config, observe=replace(config.observe, notes=notes))


def _start(
    server_words: list[str], count: int, workers: tuple[WorkerSpec, ...]
) -> dict[str, object]:
    """The pool settings for servers to start; ConfigError on unknown words."""
    names_model = any(w.partition("=")[0] in _MODEL for w in server_words)
    if not count and not names_model:
        if server_words:
            raise _unknown(server_words[0])
        return {}
    if workers:
        raise ConfigError(
            f"{'--dp-size' if count else '--model-path'} starts servers, and others are named too",
            hint="start the router with one or the other, and add more by POST /workers",
        )
    return {"start": tuple(server_words), "count": count or 1}


def _check_models(config: RouterConfig, workers: tuple[WorkerSpec, ...]) -> None:
    """Raise ConfigError on flags that cannot be combined with models that the router starts."""
    policy = config.policy
    others = {
        "--worker-urls": bool(workers),
        "--dp-size": bool(config.pool.count),
        "--pd-disaggregation": config.pool.is_paired,
        "--follow-kv-events": policy.follows_events,
        "--disable-health-check": config.health.is_off,
    }
    for flag, is_given in others.items():
        if is_given:
            raise ConfigError(
                f"{flag} cannot be combined with models that the router starts "
                "(--models, --models-dir, --models-preset)",
                hint="leave it out; flags of the servers may be given for all or in the preset",
            )


def _unknown(word: str) -> ConfigError:
    names = [f"--{name}" for _, flags in GROUPS for flag in flags for name in flag.names]
    near = difflib.get_close_matches(word.partition("=")[0], names, n=1)
    hint = f"did you mean {near[0]}?" if near else "see --help"
    if not word.startswith("-"):
        hint = "servers are named by --worker-urls"
    return ConfigError(f"unknown flag or word {printable(word, 60)!r}", hint=hint)


def _workers(values: Mapping[str, object]) -> tuple[WorkerSpec, ...]:
    urls, prefill, decode, ports = (_words(values.get(name)) for name in _WORKER_FIELDS)
    pairs = _with_ports(prefill)
    if ports:
        if any(port is not None for _, port in pairs) or len(ports) not in (1, len(pairs)):
            raise ConfigError(
                f"{len(ports)} --prefill-bootstrap-ports for {len(pairs)} prefill servers",
                hint="give one for each, or one for all, and none after --prefill",
            )
        each = ports * len(pairs) if len(ports) == 1 else ports
        pairs = [(url, _port(port)) for (url, _), port in zip(pairs, each, strict=True)]
    named = [
        *(WorkerSpec(checked_url(url)) for url in urls),
        *(WorkerSpec(checked_url(url), PREFILL, port) for url, port in pairs),
        *(WorkerSpec(checked_url(url), DECODE) for url in decode),
    ]
    for at, spec in enumerate(named):
        if any(spec.url == other.url for other in named[:at]):
            raise ConfigError(f"{spec.url} is named twice", hint="name each server once")
    return tuple(named)


def _with_ports(words: Sequence[str]) -> list[tuple[str, int | None]]:
    """Parse `URL [PORT] …`: each server with its bootstrap port."""
    found: list[tuple[str, int | None]] = []
    for word in words:
        is_port = word.isdigit() or word.lower() == "none"
        if not is_port:
            found.append((word, None))
        elif not found:
            raise ConfigError(f"--prefill {word}: a server's URL comes before its bootstrap port")
        elif word.isdigit():
            found[-1] = (found[-1][0], _port(word))
    return found


def _port(text: str) -> int:
    port = int(text[:6])
    if not 0 < port < 1 << 16:
        raise ConfigError(f"{text[:10]} is no port", hint="ports are in [1, 65535]")
    return port


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, tuple) else []


def _check(config: RouterConfig) -> None:
    """Raise ConfigError on incompatible flags."""
    pool = config.pool
    kinds = {spec.kind for spec in pool.workers}
    if pool.is_paired and PLAIN in kinds:
        raise ConfigError(
            "--worker-urls names servers that do all, and --pd-disaggregation wants none",
            hint="name them with --prefill and --decode",
        )
    if not pool.is_paired and kinds - {PLAIN}:
        raise ConfigError(
            "--prefill and --decode name servers of two kinds",
            hint="give --pd-disaggregation as well",
        )
    if pool.is_paired and pool.start:
        raise ConfigError(
            "a router starts servers that do all, not prefill and decode servers",
            hint="start them with --disaggregation-mode, and name them with --prefill and --decode",
        )
    if not pool.is_paired and (config.policy.prefill or config.policy.decode):
        raise ConfigError(
            "--prefill-policy and --decode-policy choose among prefill and decode servers",
            hint="give --policy, or --pd-disaggregation as well",
        )
    policy = config.policy
    if policy.follows_events and "cache_aware" not in (policy.name, policy.prefill, policy.decode):
        raise ConfigError(
            "--follow-kv-events is for the policy cache_aware, and no servers have that",
            hint="leave it out, or give --policy cache_aware",
        )
    if not config.health.path.startswith("/") or not config.health.path.isascii():
        raise ConfigError("--health-check-endpoint must be a path, as /health")


log = logger(__name__)

USAGE = """banyan router --worker-urls URL … [flags]
banyan router --pd-disaggregation --prefill URL [PORT] … --decode URL … [flags]
banyan router --model-path M --dp-size N [flags of the router and of banyan serve]

Distributes requests over several servers. With --model-path it starts the servers itself and
passes them all flags that are not the router's.
A flag can also be given as an environment variable: --api-key is BANYAN_API_KEY.
"""
LB_USAGE = """python -m banyan.launch_lb --prefill URL … --decode URL … [flags]

The router with prefill and decode servers: as banyan router --pd-disaggregation --policy random,
on port 8000.
"""
LB = RouterConfig(
    server=ServerConfig(port=8000),
    pool=PoolConfig(is_paired=True),
    policy=PolicyConfig(name="random"),
    limits=LimitConfig(request_s=600.0),
)
_SHARE = "--mem-fraction-static"
_MOST_TEXT = 2000
GRACE_S = 40.0
"""What servers that were started here get to end in order."""


def router(argv: Sequence[str]) -> int:
    """Route until stopped; returns the exit code."""
    return _route(argv, RouterConfig(), USAGE)


def lb(argv: Sequence[str]) -> int:
    """The same with the defaults of the mini load balancer."""
    return _route(argv, LB, LB_USAGE)


def _route(argv: Sequence[str], defaults: RouterConfig, usage: str) -> int:
    if "-h" in argv or "--help" in argv:
        print(usage + help_text())
        return 0
    check_system()
    environment = read_environment()
    forget_secrets()

    def check_servers(flags: Sequence[str]) -> None:
        parse(flags, environment)

    config = read_flags(argv, environment.flags, check_servers, defaults)
    config = replace(config, secret=environment.dist_secret)
    if config.observe.logs_json:
        wrap_standard_error()
    start_logging("router", config.observe.log_level, config.observe.logs_json)
    log_always(log, config.observe.notes)
    from banyan.router.lifecycle import run_router

    with _servers(config) as (specs, children):

        def lost() -> str:
            gone = [child for child in children if not child.is_alive()]
            return f"{gone[0].role} ended at its start" if gone else ""

        pool = replace(config.pool, workers=(*config.pool.workers, *specs))
        policy = replace(config.policy, events_secret=environment.dist_secret)
        host = LocalHost(config, environment) if config.models.is_on else None
        return run_router(replace(config, pool=pool, policy=policy), lost, host)


@contextmanager
def _servers(config: RouterConfig) -> Generator[tuple[list[WorkerSpec], list[Child]]]:
    """Servers of the router's own on loopback ports, stopped at the end of the block."""
    specs: list[WorkerSpec] = []
    children: list[Child] = []
    try:
        for number in range(config.pool.count if config.pool.start else 0):
            child, spec = _start_server(config, f"server{number}", config.pool.start)
            children.append(child)
            specs.append(spec)
        yield specs, children
    finally:
        for child in children:
            child.stop(GRACE_S)


def _start_server(
    config: RouterConfig, role: str, words: Sequence[str]
) -> tuple[Child, WorkerSpec]:
    """A server on a free loopback port, with the router's keys."""
    server, port = config.server, free_port()
    keys = {
        "--api-key": server.api_key,
        "--api-key-file": server.api_key_file,
        "--admin-api-key": server.admin_api_key,
    }
    shared = [word for flag, key in keys.items() if key for word in (flag, key)]
    own = ["--host", "127.0.0.1", "--port", str(port)]
    own += [*shared, "--log-format", config.observe.whole_log_format]
    child = spawn("banyan.cli.client", role, json.dumps([*words, *own]).encode())
    return child, WorkerSpec(f"http://127.0.0.1:{port}")


class LocalHost:
    """The models of this machine, as a `ModelHost`."""

    def __init__(self, config: RouterConfig, environment: Environment) -> None:
        self._config = config
        self._environment = environment
        self._load = parse(("demo", *config.pool.start), environment).model
        for model in self.find():
            parse((*model.words, *config.pool.start), environment)

    def find(self) -> list[NamedModel]:
        """The named models, then the preset, then the folder; a name counts once."""
        rule, found = self._config.models, dict[str, NamedModel]()
        for model in (*_named(rule.names), *_preset(rule.preset), *self._in(rule.folder)):
            found.setdefault(model.name, model)
        return list(found.values())

    def start(self, source: NamedModel, limit_bytes: int) -> tuple[Child, WorkerSpec]:
        words = [*self._config.pool.start, *source.words, "--served-model-name", source.name]
        if limit_bytes and _SHARE not in words:
            total = open_platform("auto").memory().total_bytes
            words += [_SHARE, f"{min(0.95, limit_bytes / total):.4f}"]
        return _start_server(self._config, source.name, words)

    async def change_hub(self, verb: str, name: str) -> str:
        load = self._load
        command = [sys.executable, "-m", "banyan", verb, name]
        command += ["--download-dir", load.download_dir] if load.download_dir else []
        command += ["--offline"] if load.offline and verb == "pull" else []
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=for_downloads(self._environment),
        )
        try:
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        lines = said.decode("utf-8", "replace").strip().splitlines()
        failure = printable(" ".join(lines[-3:]), _MOST_TEXT) or f"banyan {verb} failed"
        return failure if process.returncode else ""

    def _in(self, folder: str) -> Iterator[NamedModel]:
        """The models in a folder, or in the hub's cache."""
        if folder == HUB:
            from banyan.hub.downloads import held_models
            from banyan.hub.huggingface import cache_folder

            for held in held_models(cache_folder(self._load, self._environment)):
                if not held.is_part:
                    name = held.name or held.source
                    yield NamedModel(name, (held.source,), held.size_bytes)
            return
        try:
            paths = sorted(Path(folder).expanduser().iterdir()) if folder else []
        except OSError as error:
            raise ConfigError(f"--models-dir {folder}: {error.strerror}") from None
        for path in paths:
            if path.suffix == ".gguf":
                yield NamedModel(path.stem, (str(path),), path.stat().st_size)
            elif (path / "config.json").is_file() or any(path.glob("*.gguf")):
                yield NamedModel(path.name, (str(path),), _size_of(path))


def _named(names: Sequence[str]) -> Iterator[NamedModel]:
    for word in names:
        name, equals, source = word.partition("=")
        yield NamedModel(name, (source if equals else word,), _size_of(Path(source or word)))


def _preset(path: str) -> Iterator[NamedModel]:
    """The models of a preset; ConfigError if an entry is no mapping, or names no model."""
    for name, flags in (read_mapping(path, "--models-preset") if path else {}).items():
        if not is_object(flags):
            raise ConfigError(
                f"--models-preset: {printable(name, 60)} is no mapping of flags",
                hint="write NAME: {model-path: MODEL, page-size: 32}",
            )
        values = {str(flag).replace("_", "-"): value for flag, value in flags.items()}
        source = values.pop("model-path", values.pop("model", name))
        words = [str(source)]
        for flag, value in values.items():
            some = value if is_list(value) else [value]
            words += [f"--{flag}", *(json.dumps(v) if is_object(v) else _word(v) for v in some)]
        yield NamedModel(name, tuple(words), _size_of(Path(str(source))))


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size_of(path: Path) -> int:
    """Bytes of the weights in a file or a folder; of a name what the catalogue knows, or 0."""
    if path.is_file():
        return path.stat().st_size
    known = find(str(path))
    if known is not None and not path.is_dir():
        return known.needed_bytes
    files = [*path.glob("*.safetensors"), *path.glob("*.gguf")] if path.is_dir() else []
    return sum(file.stat().st_size for file in files)
