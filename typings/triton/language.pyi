from typing import Any

# The words of the kernels: a language of its own, which is not Python's to check.
def __getattr__(name: str) -> Any: ...
