# What ops/cuda uses of Triton, which torch brings where there is a GPU, and nowhere else.
from collections.abc import Callable, Sequence
from typing import Any, overload

class JITFunction:
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...

@overload
def jit(
    fn: Callable[..., object], *, do_not_specialize: Sequence[str] | None = None
) -> JITFunction: ...
@overload
def jit(
    *, do_not_specialize: Sequence[str] | None = None
) -> Callable[[Callable[..., object]], JITFunction]: ...
