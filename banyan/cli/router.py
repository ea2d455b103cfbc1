"""`banyan router` and `banyan lb`: flags to RouterConfig, servers to start, then the router."""

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from banyan.base.child_process import Child, spawn
from banyan.base.log import log_always, logger, start_logging, wrap_standard_error
from banyan.base.os import check_system
from banyan.cli.client import free_port
from banyan.config.cli import parse
from banyan.config.env import forget_secrets, read_environment
from banyan.config.schema import ServerConfig
from banyan.router.args import help_text, read_flags
from banyan.router.config import LimitConfig, PolicyConfig, PoolConfig, RouterConfig, WorkerSpec

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
        return run_router(replace(config, pool=pool, policy=policy), lost)


@contextmanager
def _servers(config: RouterConfig) -> Generator[tuple[list[WorkerSpec], list[Child]]]:
    """Servers of the router's own on loopback ports, stopped at the end of the block."""
    specs: list[WorkerSpec] = []
    children: list[Child] = []
    server = config.server
    keys = {
        "--api-key": server.api_key,
        "--api-key-file": server.api_key_file,
        "--admin-api-key": server.admin_api_key,
    }
    shared = [word for flag, key in keys.items() if key for word in (flag, key)]
    shared += ["--log-format", config.observe.whole_log_format]
    try:
        for number in range(config.pool.count if config.pool.start else 0):
            port = free_port()
            own = ["--host", "127.0.0.1", "--port", str(port), *shared]
            process_spec = json.dumps([*config.pool.start, *own]).encode()
            children.append(spawn("banyan.cli.client", f"server{number}", process_spec))
            specs.append(WorkerSpec(f"http://127.0.0.1:{port}"))
        yield specs, children
    finally:
        for child in children:
            child.stop(GRACE_S)
