"""RemoteEngines: engines of DP attention replicas on other nodes, as the leading server sees them.

Each connects to its client as a local engine does; the nodes forward the frames of both.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from banyan.base.errors import BanyanError, DeviceError
from banyan.base.log import logger
from banyan.config.schema import Config
from banyan.engine.process_spec import ENGINE, ProcessSpec
from banyan.model_config.model_config import ModelConfig

if TYPE_CHECKING:
    from banyan.engine.multi_node import Nodes

log = logger(__name__)


@dataclass(frozen=True)
class _Waiting:
    process_spec: ProcessSpec
    client: str
    on_death: Callable[[str], None]


class RemoteEngines:
    """Starts and restarts the engines of other nodes.

    Args:
        secret: the secret that all nodes share.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._nodes: Nodes | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(
        self,
        config: Config,
        model_config: ModelConfig,
        client: str,
        on_death: Callable[[str], None],
    ) -> None:
        """Start or restart one engine; returns at once.

        The nodes start when all replicas are known.

        Args:
            client: address of the engine client.
            on_death: called from a thread when the engine ends unexpectedly or does not start.

        Raises:
            ConfigError: nodes cannot connect to this machine.
        """
        parallel, process_spec = config.parallel, ProcessSpec(ENGINE, config, model_config, "")
        self._waiting[parallel.replica] = _Waiting(process_spec, client, on_death)
        if parallel.replica < parallel.dp - 1:
            return
        if self._nodes is None:
            # Imports ZeroMQ, which a server without nodes does not need.
            from banyan.engine.multi_node import Nodes, check_secret, own_hello

            check_secret(parallel, self._secret)
            self._nodes = Nodes(parallel, self._secret, own_hello(parallel, model_config))
        engines, self._waiting = self._waiting, {}
        arguments = (self._nodes, engines, self._thread)
        self._thread = threading.Thread(target=self._open, args=arguments, name="remote engines")
        self._thread.start()

    def close(self) -> None:
        """End the nodes."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()
        if self._nodes is not None:
            self._nodes.close()

    def _open(
        self, nodes: "Nodes", engines: dict[int, _Waiting], before: threading.Thread | None
    ) -> None:
        def died(what: str) -> None:
            for engine in engines.values():
                engine.on_death(what)

        if before is not None:
            before.join()
            nodes.again()
        node_of = next(iter(engines.values())).process_spec.config.parallel.node_of
        try:
            nodes.gather(self._check)
        except BanyanError as error:
            died(str(error))
            return
        nodes.start(
            lambda node: [e.process_spec for n, e in engines.items() if node_of(n) == node],
            clients={number: engine.client for number, engine in engines.items()},
        )
        nodes.watch(died)

    def _check(self) -> None:
        if self._is_closed:
            raise DeviceError("the server ends")
