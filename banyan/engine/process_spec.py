"""ProcessSpec: what a child process is told when it starts, and the form in which it travels."""

from dataclasses import dataclass

import msgspec

from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

NO_RECORDING = -1
"""In the place of a descriptor."""
ENGINE = "engine"
RANK = "rank"


@dataclass(frozen=True)
class ProcessSpec:
    """
    Attributes:
        role: ENGINE, or RANK for the ranks other than 0.
        address: link to the front (engine), or plans from rank 0 (rank).
        mesh_address: where the ranks meet; "" when there is one.
        pulse: file for the signs of life of a rank.
        secret: what the nodes of this replica have in common.
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
    """Descriptor of the flight recorder's memory, which the child has too (engine)."""

    @property
    def process_name(self) -> str:
        return f"{RANK}{self.rank}" if self.role == RANK else self.role

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)  # JSON has no infinity

    @staticmethod
    def decode(body: bytes) -> "ProcessSpec":
        return msgspec.msgpack.decode(body, type=ProcessSpec)
