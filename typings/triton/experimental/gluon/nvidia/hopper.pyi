from torch import Tensor

class TensorDescriptor:
    def __init__(
        self,
        base: Tensor,
        shape: list[int],
        strides: list[int],
        block_shape: list[int],
        layout: object,
    ) -> None: ...
