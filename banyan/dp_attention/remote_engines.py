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
    front: str
    on_death: Callable[[str], None]


class RemoteEngines:
    """
    Args:
        secret: what the nodes have in common.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._nodes: Nodes | None = None
        self._waiting: dict[int, _Waiting] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(
        self, config: Config, model_config: ModelConfig, front: str, on_death: Callable[[str], None]
    ) -> None:
        """Start one of them, or the one that takes its place; returns at once. Nodes are told when
        the last replica is known.

        Args:
            front: address of the link's other end.
            on_death: called from a thread when the engine ends unasked, or did not start.

        Raises:
            ConfigError: nodes cannot come to this machine.
        """
        parallel, process_spec = config.parallel, ProcessSpec(ENGINE, config, model_config, "")
        self._waiting[parallel.replica] = _Waiting(process_spec, front, on_death)
        if parallel.replica < parallel.dp - 1:
            return
        if self._nodes is None:
            # ZeroMQ comes with them: a server that leads no nodes does without.
            from banyan.engine.multi_node import Nodes, check_secret, own_hello

            check_secret(parallel, self._secret)
            self._nodes = Nodes(parallel, self._secret, own_hello(parallel, model_config))
        engines, self._waiting = self._waiting, {}
        whole = (self._nodes, engines, self._thread)
        self._thread = threading.Thread(target=self._open, args=whole, name="far engines")
        self._thread.start()

    def close(self) -> None:
        """Let the nodes end."""
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
            fronts={number: engine.front for number, engine in engines.items()},
        )
        nodes.watch(died)

    def _check(self) -> None:
        if self._is_closed:
            raise DeviceError("the server ends")
