"""AdapterNames: cache namespaces of requests with adapters, and whose such a namespace is."""

from hashlib import blake2b

_DIGEST_BYTES, _MARK_BYTES = 16, 8


class LoRANamespaces:
    """Of the adapters that requests have named so far."""

    def __init__(self) -> None:
        self._by_mark: dict[bytes, str] = {}

    def narrowed(self, namespace: bytes, name: str, digest: str) -> bytes:
        """A namespace of an adapter's own, and of one version of it, within another: a digest of
        all three, followed by the adapter's mark."""
        parts = "\0".join((namespace.hex(), name, digest))
        mark = _mark(name)
        self._by_mark[mark] = name
        return blake2b(parts.encode(), digest_size=_DIGEST_BYTES).digest() + mark

    def adapter_of(self, namespace: bytes) -> str:
        """The adapter that a namespace belongs to; "" for none."""
        if len(namespace) != _DIGEST_BYTES + _MARK_BYTES:
            return ""
        return self._by_mark.get(namespace[_DIGEST_BYTES:], "")


def id_of(name: str) -> int:
    """A number that stands for an adapter's name wherever it is served: 1 … 2³¹ − 1."""
    return 1 + int.from_bytes(_mark(name), "big") % (2**31 - 1)


def _mark(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=_MARK_BYTES).digest()
