"""torch.save files (pytorch_model.bin): a zip archive of raw storages and one pickle that says how
tensors lie in them.

No pickle machine runs. `pickletools` splits the pickle into opcodes without executing them, and
only those that describe a dictionary of tensors are understood. Any other opcode or name is an
error, so the file cannot call anything.

Source: torch/serialization.py and torch/_utils.py of PyTorch; the documentation of pickletools.
"""

import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from banyan.base.json_types import is_list
from banyan.base.log import printable
from banyan.formats.mapped import MAX_DIMS, MAX_TENSORS, MappedFile, TensorInfo
from banyan.formats.safetensors import TYPE_BITS

_MAX_PICKLE_BYTES = 64 << 20
_MAX_OPCODES = 8_000_000
_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
    *(ValueError, OverflowError, RuntimeError),
)
"""What zipfile raises for damaged, encrypted and strange archives."""
_LOCAL_HEADER = 30
"""Bytes of a zip entry's header in front of its name and its extra field."""

_TYPES: Mapping[str, str] = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
_WRAPPERS = ("state_dict", "model", "module")
"""Keys of a dictionary that holds the dictionary of tensors."""


@dataclass(frozen=True)
class _Name:
    """A name that the pickle refers to; never looked up."""

    module: str
    name: str


@dataclass(frozen=True)
class _Storage:
    type: str
    key: str
    count: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchFile(MappedFile):
    """An open file of torch.save: `tensors` by name. Tied tensors may share bytes."""

    def __init__(self, path: str, is_mapped: bool = True) -> None:
        super().__init__(path, "torch", is_mapped)

    @classmethod
    def open(cls, path: str, is_mapped: bool = True) -> Self:
        """Map the file, or read it whole, and find its tensors.

        Raises:
            ModelError: missing, cut short, not to be trusted, or more than a dictionary of tensors.
        """
        file = cls(path, is_mapped)
        try:
            file._read()
        except BaseException:
            file.close()
            raise
        return file

    def _read(self) -> None:
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                described = [name for name in entries if name.endswith("/data.pkl")]
                if len(described) != 1 or entries[described[0]].file_size > _MAX_PICKLE_BYTES:
                    raise self.error("it has no data.pkl, or one that is too large")
                root = described[0].removesuffix("data.pkl")
                order = entries.get(root + "byteorder")
                is_little = order is None or archive.open(order).read(7) == b"little"
                pickled = archive.read(described[0])
        except _DAMAGE as error:
            raise self.error(
                f"it is no zip archive: {printable(str(error), 100)}",
                "files of torch before 1.6 are not read; save the model as safetensors",
            ) from None
        if not is_little:
            raise self.error("its numbers are not little-endian")
        for name, tensor in self._named_tensors(pickled):
            self.tensors[name] = self._located(name, tensor, root, entries)

    def _named_tensors(self, pickled: bytes) -> Iterator[tuple[str, _Tensor]]:
        found = _Reader(self._refuse).read(pickled)
        for wrapper in _WRAPPERS:
            if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
                found = found[wrapper]
        if not isinstance(found, dict) or len(found) > MAX_TENSORS:
            raise self._refuse("it is no dictionary of tensors")
        for name, tensor in found.items():
            if not isinstance(name, str) or not isinstance(tensor, _Tensor):
                raise self._refuse(f"{printable(str(name), 80)!r} is no tensor")
            yield name, tensor

    def _located(
        self, name: str, tensor: _Tensor, root: str, entries: Mapping[str, zipfile.ZipInfo]
    ) -> TensorInfo:
        storage = tensor.storage
        entry = entries.get(f"{root}data/{storage.key}")
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise self.error(f"the storage of {printable(name)!r} is missing or compressed")
        each, count = TYPE_BITS[storage.type] // 8, math.prod(tensor.shape)
        end = tensor.offset + count
        if end > storage.count or storage.count * each > entry.file_size:
            raise self.error(f"tensor {printable(name)!r} leaves its storage")
        expected = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
            if size > 1 and stride != expected:
                raise self.error(
                    f"tensor {printable(name)!r} is not contiguous",
                    "save it as safetensors",
                )
            expected *= size
        at = entry.header_offset
        header = bytes(self._map[at : at + _LOCAL_HEADER])
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        first = at + _LOCAL_HEADER + lengths + tensor.offset * each
        if first + count * each > self.size_bytes:
            raise self.error(f"tensor {printable(name)!r} leaves the file")
        return TensorInfo(name, tensor.shape, storage.type, first, count * each)

    def _refuse(self, text: str) -> Exception:
        return self.error(
            f"{text}; only dictionaries of plain tensors are read, because other objects can run "
            "code when they are opened",
            "save the weights as safetensors on a machine you trust with this file",
        )


class _Reader:
    """Reads the opcodes of a pickle as data.

    Args:
        refuse: makes the error for what is not understood.
    """

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        self._refuse = refuse
        self._stack: list[object] = []
        self._marks: list[list[object]] = []
        self._memo: dict[int, object] = {}

    def read(self, pickled: bytes) -> object:
        """The value that the pickle describes, with `_Tensor` for tensors."""
        try:
            for count, (code, argument, _) in enumerate(pickletools.genops(pickled)):
                if count > _MAX_OPCODES:
                    raise self._refuse(f"its description has more than {_MAX_OPCODES:,} steps")
                if code.name == "STOP":
                    return self._stack.pop()
                self._take(code.name, argument)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            raise self._refuse(f"its description is damaged ({type(error).__name__})") from None
        raise self._refuse("its description has no end")

    def _take(self, code: str, argument: object) -> None:
        stack = self._stack
        match code:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._marks.append(stack)
                self._stack = []
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[code])
            case "EMPTY_DICT":
                stack.append(dict[object, object]())
            case "EMPTY_LIST":
                stack.append(list[object]())
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(code[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "TUPLE":
                self._stack = self._marks.pop()
                self._stack.append(tuple(stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[int(str(argument))] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[int(str(argument))])
            case "GLOBAL":
                module, _, name = str(argument).partition(" ")
                stack.append(_Name(module, name))
            case "STACK_GLOBAL":
                module, name = stack[-2:]
                stack[-2:] = [_Name(str(module), str(name))]
            case "BINPERSID":
                stack[-1] = self._storage(stack[-1])
            case "REDUCE":
                function, arguments = stack[-2:]
                stack[-2:] = [self._made(function, arguments)]
            case "SETITEM":
                self._set(stack[-3], stack[-2:])
                del stack[-2:]
            case "SETITEMS":
                self._stack = self._marks.pop()
                self._set(self._stack[-1], stack)
            case "APPEND" | "APPENDS":
                self._append(stack, code)
            case "BUILD":  # attributes of a dictionary, such as versions of its modules
                if not isinstance(stack[-2], dict):
                    raise self._refuse("it sets attributes of an object")
                del stack[-1]
            case _ if code in _VALUES:
                stack.append(argument)
            case _:
                raise self._refuse(f"it has the opcode {code}")

    def _append(self, stack: list[object], code: str) -> None:
        values = [stack.pop()] if code == "APPEND" else stack
        if code == "APPENDS":
            self._stack = self._marks.pop()
        target = self._stack[-1]
        if not is_list(target):
            raise self._refuse("it appends to an object")
        target += values

    def _set(self, target: object, pairs: list[object]) -> None:
        if not isinstance(target, dict) or len(pairs) % 2:
            raise self._refuse("it sets items of an object")
        target.update(zip(pairs[::2], pairs[1::2], strict=True))

    def _storage(self, persistent: object) -> _Storage:
        match persistent:
            case ("storage", _Name("torch", name), str(key), str(), int(count)) if name in _TYPES:
                if key.isalnum() and type(count) is int and 0 <= count < 1 << 62:
                    return _Storage(_TYPES[name], key, count)
        raise self._refuse(f"it has a storage of an unknown kind: {printable(str(persistent), 80)}")

    def _made(self, function: object, arguments: object) -> object:
        match (function, arguments):
            case (_Name("collections", "OrderedDict"), ()):
                return dict[object, object]()
            case (_Name("torch._utils", "_rebuild_parameter"), (_Tensor() as tensor, *_)):
                return tensor
            case (
                _Name("torch._utils", "_rebuild_tensor_v2"),
                (_Storage() as storage, int(offset), tuple(shape), tuple(stride), *_),
            ):
                sizes = (offset, *shape, *stride)
                is_plain = all(type(n) is int and 0 <= n < 1 << 62 for n in sizes)
                if is_plain and len(shape) == len(stride) <= MAX_DIMS:
                    return _Tensor(storage, offset, shape, stride)
        called = f"{function.module}.{function.name}" if isinstance(function, _Name) else function
        raise self._refuse(f"it calls {printable(str(called), 80)}")


_VALUES = (
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2"),
    *("LONG1", "BINFLOAT"),
)
"""Opcodes that push their argument."""
