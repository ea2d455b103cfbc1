from typing import Any

# As triton/language.pyi.
def __getattr__(name: str) -> Any: ...
