"""What the flags say of servers that share the work, one computing prompts and one continuing them:
which combinations are refused. Part of `config/resolve.py`; knows no connections.
"""

from importlib.util import find_spec

from banyan.base.errors import ConfigError
from banyan.base.hosts import is_loopback
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

_ENGINES = {
    "mooncake": (
        "mooncake",
        "pip install 'banyan[mooncake]' (on Debian and Ubuntu also: apt install libibverbs1)",
    ),
    "nixl": ("nixl", "pip install --no-deps nixl nixl-cu12"),
    "ascend": ("memfabric_hybrid", "pip install 'banyan[memfabric]'"),
}
"""Transfer engines: the package that is imported, and what installs it."""
_LAST_PORT = (1 << 16) - 1


def check_the_handoff(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Pages are handed over by one replica to one replica, and shared like any prefix."""
    handoff, parallel, cache = config.handoff, config.parallel, config.cache
    if not handoff.role:
        return config
    flag = f"--disaggregation-mode {handoff.mode}"
    package, install = _ENGINES.get(handoff.transfer, ("", ""))
    if package and find_spec(package) is None:
        raise ConfigError(
            f"--disaggregation-transfer-backend {handoff.transfer} needs a package that is not "
            f"installed: {package}",
            hint=f"run: {install}; or use tcp, which needs none",
        )
    if handoff.mode == "prefill" and handoff.port + parallel.dp - 1 > _LAST_PORT:
        raise ConfigError(
            f"--disaggregation-bootstrap-port {handoff.port} with --dp-size {parallel.dp}: each "
            f"replica listens at a port of its own, and the last would be "
            f"{handoff.port + parallel.dp - 1}",
            hint=f"name a port up to {_LAST_PORT + 1 - parallel.dp}",
        )
    if handoff.mode == "prefill" and parallel.uses_dp_attention and parallel.nodes > 1:
        raise ConfigError(
            f"{flag} with --enable-dp-attention and {parallel.nodes_flag} {parallel.nodes}: "
            "prompts are taken from the address of one server, and some replicas are elsewhere",
            hint="start a server on each machine: --nnodes 1 there, and a router before them",
        )
    if cache.store:
        raise ConfigError(
            f"{flag} and --hicache-storage-backend {cache.store} exclude each other: pages come "
            "from one place at a time",
            hint="leave one of them out",
        )
    if (
        model_config.pooling is not None
        or model_config.needs_whole_prompts
        or config.model.is_embedding
    ):
        raise ConfigError(f"{flag}: this model generates nothing", hint="leave it out")
    if handoff.mode == "prefill" and not is_loopback(config.server.host):
        _check_the_secret(flag, config.server.host, environment)
    return config


def _check_the_secret(flag: str, host: str, environment: Environment) -> None:
    if not environment.dist_secret:
        raise ConfigError(
            f"{flag} listens at {host}, which others may reach, and has no secret",
            hint="set BANYAN_DIST_SECRET to the same long random text for both servers",
        )
