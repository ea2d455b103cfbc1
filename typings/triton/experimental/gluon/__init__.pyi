from collections.abc import Callable

from triton import JITFunction

def jit(fn: Callable[..., object]) -> JITFunction: ...
