"""AdapterNames: the LoRA adapters that requests may name."""

from collections.abc import Iterable
from typing import cast

from banyan.base.errors import RequestError
from banyan.config.schema import LoraConfig
from banyan.lora.adapter_files import AdapterPlace, named_adapters

_SHOWN = 20
_MAX_NAME = 4096
"""Longest name or path, in characters."""
_MAX_LEFT = 4096
"""Names of unloaded adapters that are remembered."""


class AdapterNames:
    """The loaded adapters by name, and the names of unloaded ones.

    Args:
        is_enabled: the server serves adapters.
        places: adapters loaded at start.
    """

    def __init__(self, is_enabled: bool = False, places: Iterable[AdapterPlace] = ()) -> None:
        self.is_enabled = is_enabled
        self._places = {place.name: place for place in places}
        self._left: dict[str, None] = {}

    @classmethod
    def of(cls, lora: LoraConfig) -> "AdapterNames":
        return cls(lora.is_enabled or bool(lora.paths), named_adapters(lora.paths))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def places(self) -> list[AdapterPlace]:
        return list(self._places.values())

    def add(self, place: AdapterPlace) -> None:
        self._places[place.name] = place
        self._left.pop(place.name, None)

    def remove(self, name: str) -> None:
        self._places.pop(name, None)
        self._left.pop(name, None)
        self._left[name] = None
        if len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]

    def has_left(self, name: str) -> bool:
        """Whether an unloaded adapter had the name; a model of that name must not answer."""
        return name in self._left

    def named(self, given: object, param: str = "lora_path", status: int = 400) -> str:
        """The adapter that a request names, by its name or by the exact path given at start; "" for
        null and "".

        Raises:
            RequestError: there is no such adapter; the text lists the loaded ones.
        """
        if given is None or given == "":
            return ""
        if not isinstance(given, str) or len(given) > _MAX_NAME:
            raise RequestError(f"{param} must be the name of an adapter.", param=param)
        if given in self._places:
            return given
        for place in self._places.values():
            if given == place.path:
                return place.name
        shown = given if len(given) <= 80 else given[:80] + "…"
        if not self.is_enabled:
            raise RequestError(
                f"{param} {shown!r}: this server has no adapters",
                param=param,
                status=status,
                code="model_not_found",
                hint="Start it with --enable-lora and --lora-paths.",
            )
        raise RequestError(
            f"The adapter {shown!r} is not loaded. {self._listed()}",
            param=param,
            status=status,
            code="model_not_found",
        )

    def of_prompts(self, given: object, count: int) -> list[str]:
        """The adapter of each of `count` prompts: one for all, or a list.

        Raises:
            RequestError: as `named`; a list has not one entry for each prompt.
        """
        if not isinstance(given, list):
            return [self.named(given)] * count
        return [self.named(entry) for entry in one_each(cast(list[object], given), count)]

    def _listed(self) -> str:
        if not self._places:
            return "No adapter is."
        names = sorted(self._places)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"There are: {', '.join(names[:_SHOWN])}{more}."


def one_each(entries: list[object], count: int) -> list[object]:
    """A list in `lora_path`.

    Raises:
        RequestError: it has not one entry for each of `count` prompts.
    """
    if len(entries) != count:
        raise RequestError(
            f"lora_path has {len(entries)} names for {count} prompts", param="lora_path"
        )
    return entries
