"""Facts of Ascend NPUs that flags depend on, and the checks at a start. No torch and no driver."""

from banyan.ascend.launch.facts import SOCS, Launch, arguments_of_config, read_model
from banyan.ascend.launch.machine import find_soc, own_interfaces, own_packages
from banyan.ascend.launch.rules import check as check_rules
from banyan.ascend.variables import VARIABLES
from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.devices import DeviceFacts, HostTierFacts
from banyan.config.env import Environment
from banyan.config.schema import Config

log = logger(__name__)


def _check_start(config: Config, folder: str, environment: Environment) -> None:
    """Check the rules of Ascend NPUs: errors end the start, warnings are logged.

    Args:
        config: as it was given, before anything was resolved.
        folder: of the model; "" before it is found.

    Raises:
        ConfigError: all broken rules.
    """
    findings = check_rules(_launch(config, folder, environment))
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
        log.warning("no Ascend NPU is seen on the PCI bus or in /dev: the rules of an A3 apply")
    return Launch(
        arguments=arguments_of_config(config),
        variables=environment.launch,
        soc=SOCS.get(soc, SOCS["A3"]),
        interfaces=own_interfaces(),
        packages=own_packages() if is_real else None,
        model=read_model(folder) if folder else None,
    )


def chip_of(environment: Environment) -> str:
    """The chip that rules and outcomes of a start are for; an A3 where none is seen."""
    return environment.npu.soc if environment.npu.driver else find_soc() or "A3"


def _is_here(environment: Environment) -> bool:
    return bool(environment.npu.driver or find_soc())


NPU = DeviceFacts(
    has_graphs=True,
    attention="ascend",
    host_tier=HostTierFacts(
        copies=("kernel_ascend", "direct"),
        layouts=("page_first_direct", "page_first_kv_split"),
        serves_ranks=True,
    ),
    variables=VARIABLES,
    check_start=_check_start,
    chip=chip_of,
    is_here=_is_here,
)
