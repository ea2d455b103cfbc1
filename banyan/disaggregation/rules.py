"""The rule of --disaggregation-mode: transfer packages, ports and the shared secret."""

import os
from dataclasses import replace
from importlib.util import find_spec

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.base.log import printable
from banyan.base.os import is_loopback
from banyan.config.env import Environment
from banyan.config.schema import Config, HandoffConfig
from banyan.model_config.model_config import ModelConfig

_ENGINES = {
    "mooncake": (
        "mooncake",
        f"{install_command('mooncake')} (on Debian and Ubuntu also: apt install libibverbs1)",
    ),
    "nixl": ("nixl", "pip install --no-deps nixl nixl-cu12"),
    "ascend": ("memfabric_hybrid", install_command("memfabric")),
}
"""Transfer engine -> its Python package, and the command that installs it."""
_MOONCAKE = "mooncake"
_RDMA_ENGINES = (_MOONCAKE, "nixl")
RDMA_FOLDER = "/sys/class/infiniband"
_LAST_PORT = (1 << 16) - 1


def check_disaggregation(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    config = _take_mooncake_devices(config)
    handoff, parallel = config.handoff, config.parallel
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
    _check_transfer_devices(handoff)
    if handoff.mode == "prefill" and handoff.port + parallel.dp - 1 > _LAST_PORT:
        raise ConfigError(
            f"--disaggregation-bootstrap-port {handoff.port} with --dp-size {parallel.dp}: each "
            f"replica needs its own port, and the last one would be "
            f"{handoff.port + parallel.dp - 1}",
            hint=f"choose a port up to {_LAST_PORT + 1 - parallel.dp}",
        )
    if handoff.mode == "prefill" and parallel.uses_dp_attention and parallel.nodes > 1:
        raise ConfigError(
            f"{flag} with --enable-dp-attention and {parallel.nodes_flag} {parallel.nodes}: "
            "decode servers know one address, and some replicas run on other machines",
            hint="start a server on each machine: --nnodes 1 there, and a router before them",
        )
    if (
        model_config.pooling is not None
        or model_config.needs_whole_prompts
        or config.model.is_embedding
    ):
        raise ConfigError(f"{flag}: this model generates no text", hint="leave it out")
    if handoff.mode == "prefill" and not is_loopback(config.server.host):
        _check_secret(flag, config.server.host, environment)
    return config


def _take_mooncake_devices(config: Config) -> Config:
    """Use --mooncake-ib-device for the transfers of Mooncake, where no other devices are named."""
    handoff, devices = config.handoff, config.handoff.mooncake_devices
    if not devices:
        return config
    _check_devices("--mooncake-ib-device", devices)
    if handoff.transfer != _MOONCAKE or handoff.rdma_devices:
        return config
    return replace(config, handoff=replace(handoff, rdma_devices=devices))


def _check_transfer_devices(handoff: HandoffConfig) -> None:
    """Refuse RDMA devices that this machine or the transfer engine has not."""
    if not handoff.rdma_devices:
        return
    flag = "--disaggregation-ib-device"
    if handoff.transfer not in _RDMA_ENGINES:
        raise ConfigError(
            f"{flag} {printable(handoff.rdma_devices, 80)}: the transfer backend "
            f"{handoff.transfer} takes no devices by name",
            hint=f"use {' or '.join(_RDMA_ENGINES)}, or leave the devices out",
        )
    _check_devices(flag, handoff.rdma_devices)


def _check_devices(flag: str, devices: str) -> None:
    here = sorted(os.listdir(RDMA_FOLDER)) if os.path.isdir(RDMA_FOLDER) else []
    for name in devices.split(","):
        if name.partition(":")[0] not in here:
            raise ConfigError(
                f"{flag} {printable(devices, 80)}: this machine has no RDMA device "
                f"{printable(name, 40)!r}",
                hint=f"it has {', '.join(here) or 'none'} ({RDMA_FOLDER})",
            )


def _check_secret(flag: str, host: str, environment: Environment) -> None:
    if not environment.dist_secret:
        raise ConfigError(
            f"{flag} listens at {host}, which other machines can reach, and has no secret",
            hint="set BANYAN_DIST_SECRET to the same long random text for both servers",
        )
