"""ProcessSpec: the arguments of an engine or rank process, as a message."""

from dataclasses import dataclass

import msgspec

from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

NO_RECORDING = -1
"""Stands for a descriptor if nothing is recorded."""
ENGINE = "engine"
RANK = "rank"


@dataclass(frozen=True)
class ProcessSpec:
    """Arguments of one process.

    Attributes:
        role: ENGINE, or RANK for the ranks other than 0.
        address: address of the engine client (engine), or of plans from rank 0 (rank).
        mesh_address: rendezvous address of the ranks; "" for one rank.
        pulse: heartbeat file of a rank.
        secret: secret shared by the nodes of this replica.
    """

    role: str
    config: Config
    model_config: ModelConfig
    address: str
    rank: int = 0
    mesh_address: str = ""
    pulse: str = ""
    secret: str = ""
    recording: int = NO_RECORDING
    """Descriptor of the flight recorder's memory, which the engine process inherits."""

    @property
    def process_name(self) -> str:
        return f"{RANK}{self.rank}" if self.role == RANK else self.role

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)  # JSON has no infinity

    @staticmethod
    def decode(body: bytes) -> "ProcessSpec":
        return msgspec.msgpack.decode(body, type=ProcessSpec)
