# What transfer/rooms/mooncake.py uses of Mooncake's transfer engine, which brings no types.
from collections.abc import Sequence

class TransferEngine:
    def initialize(self, local: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, size_bytes: int, /) -> int: ...
    def batch_transfer_sync_write(
        self,
        peer: str,
        sources: Sequence[int],
        targets: Sequence[int],
        sizes: Sequence[int],
        /,
    ) -> int: ...
