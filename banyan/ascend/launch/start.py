"""The rules at a start on Ascend devices: errors end it, warnings are logged."""

from banyan.ascend.launch.facts import SOCS, Launch, read_model
from banyan.ascend.launch.machine import find_soc, own_interfaces, own_packages
from banyan.ascend.launch.reading import arguments_of_config
from banyan.ascend.launch.rules import check
from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config

log = logger(__name__)


def check_start(config: Config, folder: str, environment: Environment) -> None:
    """
    Args:
        config: as it was given, before anything was resolved.
        folder: where the model lies; "" before it is found.

    Raises:
        ConfigError: rules that are not kept, all of them.
    """
    findings = check(_launch(config, folder, environment))
    errors = [finding for finding in findings if finding.is_error]
    if errors:
        raise ConfigError(
            "this start breaks rules of Ascend NPUs: " + "; ".join(each.line for each in errors)
        )
    for finding in findings if folder else ():
        log.warning("%s", finding.line)


def _launch(config: Config, folder: str, environment: Environment) -> Launch:
    is_real = not environment.npu.driver
    soc = find_soc() if is_real else environment.npu.soc
    if folder and soc not in SOCS:
        log.warning("no Ascend NPU is seen on the PCI bus or in /dev: the rules are those of an A3")
    return Launch(
        arguments=arguments_of_config(config),
        variables=environment.launch,
        soc=SOCS.get(soc, SOCS["A3"]),
        interfaces=own_interfaces(),
        packages=own_packages() if is_real else None,
        model=read_model(folder) if folder else None,
    )
