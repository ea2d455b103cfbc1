"""`banyan router`, `banyan lb`, and `banyan serve` with several models: flags to RouterConfig,
servers to start, then the router.
"""

import asyncio
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from banyan.config.schema import ServerConfig
from banyan.hub.catalogue import find
from banyan.platform import open_platform
from banyan.router.args import help_text, read_flags
from banyan.router.config import (
    HUB,
    LimitConfig,
    PolicyConfig,
    PoolConfig,
    RouterConfig,
    WorkerSpec,
)
from banyan.router.models import NamedModel

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
