"""Writes a quantised folder: the weight files of a plan, with a record of finished
pieces so that an interrupted run can resume; then quantization_config, the index, and copies of the
source's other files.

A file grows as NAME.part. The record holds the hash of every piece that is written and synced.
Pieces that are missing from it, or have other bytes by now, are written again.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import cast

import torch

from banyan.base.errors import CapacityError, ConfigError
from banyan.base.json_types import is_object
from banyan.base.log import logger, printable
from banyan.models.quantize.layouts import Floats, TargetLayout
from banyan.models.quantize.plan import FilePiece, OutFile, PlanUnit, QuantizePlan, targets
from banyan.models.quantize.source import SourceCheckpoint

log = logger(__name__)

Show = Callable[[int, int], None]
"""Called with the number of finished tensors and the total."""
_COPY_BYTES = 16 << 20


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Whatever is written within lies at `path`, or in it.

    Raises:
        CapacityError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CapacityError(
            f"{printable(str(path), 200)!r} cannot grow: {error.strerror}",
            hint="free some room; the same command goes on where it was",
        ) from None


class Record:
    """What earlier runs have written, one JSON line each; the first says what of.

    Raises:
        ConfigError: the record is of another source, or of other settings.
    """

    def __init__(self, path: Path, identity: dict[str, object]) -> None:
        self.path = path
        self._whole: dict[tuple[str, int], tuple[int, str]] = {}
        if path.exists():
            self._read(json.loads(json.dumps(identity)))
            return
        self._append(identity)

    def _read(self, identity: object) -> None:
        lines = list(self._lines())
        if not lines or lines[0] != identity:
            raise ConfigError(
                f"{printable(str(self.path), 200)} is the record of a run that was cut off, of "
                "another source or with other settings",
                hint="delete its partial files, or name another target",
            )
        for line in lines[1:]:
            match line:
                case {"file": str(file), "start": int(start), "end": int(end), "sha256": str(sum)}:
                    self._whole[file, start] = (end, sum)
                case _:
                    pass

    def _lines(self) -> Iterator[object]:
        """Without those that were cut off."""
        for text in self.path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(text)

    def _append(self, line: dict[str, object]) -> None:
        with self.path.open("ab") as file:
            # What was cut off before must not swallow this line.
            file.write(b"\n" + json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def add(self, file: str, piece: FilePiece, sha256: str) -> None:
        line: dict[str, object] = {"file": file, "start": piece.start, "end": piece.end}
        self._append(line | {"sha256": sha256})

    def holds(self, name: str, piece: FilePiece, path: Path) -> bool:
        """Whether the file has these bytes, and they are those that were written."""
        end, expected = self._whole.get((name, piece.start), (0, ""))
        if end != piece.end or not path.is_file() or path.stat().st_size < end:
            return False
        with path.open("rb") as file:
            file.seek(piece.start)
            return _hash(file.read, piece.end - piece.start) == expected

    def done(self) -> None:
        self.path.unlink()


def _hash(read: Callable[[int], bytes], size: int) -> str:
    found = hashlib.sha256()
    while size and (octets := read(min(size, _COPY_BYTES))):
        found.update(octets)
        size -= len(octets)
    return found.hexdigest()


def write_files(
    plan: QuantizePlan, source: SourceCheckpoint, folder: Path, record: Record, show: Show
) -> int:
    """Write what is not there yet; returns the bytes that were.

    Raises:
        CapacityError: the disk has no room.
    """
    total, done, written = plan.num_units, 0, 0
    missing = {file.name: _missing(file, folder, record) for file in plan.files}
    _check_room(sum(p.end - p.start for pieces in missing.values() for p in pieces), folder)
    for file in plan.files:
        done += sum(len(p.units) for p in file.pieces if p not in missing[file.name])
        for piece in missing[file.name]:
            before = done

            def report(count: int, before: int = before) -> None:
                show(before + count, total)

            record.add(
                file.name, piece, _write(folder / f"{file.name}.part", piece, source, report)
            )
            done += len(piece.units)
            written += piece.end - piece.start
        part = folder / f"{file.name}.part"
        if part.exists():
            os.replace(part, folder / file.name)
    show(total, total)
    return written


def _missing(file: OutFile, folder: Path, record: Record) -> list[FilePiece]:
    """The pieces that are to be made; the file is NAME.part then."""
    whole, part = folder / file.name, folder / f"{file.name}.part"
    at = whole if whole.exists() else part
    missing = [piece for piece in file.pieces if not record.holds(file.name, piece, at)]
    if missing and whole.exists():
        os.replace(whole, part)
        at = part
    kept = len(file.pieces) - len(missing)
    if kept:
        log.info("%s: %d of %d pieces are whole", file.name, kept, len(file.pieces))
    if not kept or at == whole:
        part.unlink(missing_ok=True)
    return missing


def _check_room(needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CapacityError(
            f"{needed:,} bytes are to be written to {printable(str(folder), 200)!r}, where "
            f"{free:,} are free",
            hint="free some, or name a folder on another disk",
        )


def _write(
    path: Path, piece: FilePiece, source: SourceCheckpoint, report: Callable[[int], None]
) -> str:
    """Write one piece and bring it to the disk; returns its hash."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        written = _Written(file, piece.start)
        written.add(piece.head)
        offsets = iter(piece.offsets)
        for count, unit in enumerate(piece.units, 1):
            _write_unit(written, unit, offsets, source)
            report(count)
        written.pad(piece.end)
        file.flush()
        os.fsync(file.fileno())
        return written.sum.hexdigest()


class _Written:
    """The bytes of a piece as they come, and their hash."""

    def __init__(self, file: BufferedRandom, start: int) -> None:
        self.file, self.at, self.sum = file, start, hashlib.sha256()
        file.seek(start)

    def add(self, octets: bytes) -> None:
        self.file.write(octets)
        self.sum.update(octets)
        self.at += len(octets)

    def pad(self, offset: int) -> None:
        assert offset >= self.at, "a tensor has more bytes than its header says"
        self.add(b"\0" * (offset - self.at))


def _write_unit(
    written: _Written, unit: PlanUnit, offsets: Iterator[int], source: SourceCheckpoint
) -> None:
    with torch.inference_mode():
        if unit.rounded is None and unit.take is None:
            made = {unit.entries[0].name: source.octets(unit.source)}
        else:
            mine = source.weight(unit.source) if unit.take is None else unit.take()
            copied = {unit.entries[0].name: mine.raw.flatten()}
            made = copied if unit.rounded is None else unit.rounded.make(mine)
    for entry in unit.entries:
        written.pad(next(offsets))
        for piece in made[entry.name].split(_COPY_BYTES):
            written.add(piece.numpy().tobytes())


_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".part",
    ".index.json",
    ".py",
)
"""Endings of files that are not copied: weights, and code, which nobody here runs."""


def quantization_config(plan: QuantizePlan, layout: TargetLayout) -> dict[str, object]:
    """In compressed-tensors' form. Modules of the most common kind are named by their class."""
    kinds = sorted(plan.kinds, key=lambda kind: -len(plan.kinds[kind]))
    groups: dict[str, object] = {}
    everything = [*plan.floats, *(name for names in plan.kinds.values() for name in names)]
    for number, kind in enumerate(kinds):
        mine = set(plan.kinds[kind])
        others = [name for name in everything if name not in mine]
        named = ["Linear"] if number == 0 else targets(plan.kinds[kind], others)
        groups[f"group_{number}"] = {"targets": named, **layout.scheme(kind)}
    first = layout.scheme(kinds[0])
    left = set(plan.floats)
    rounded = [name for name in everything if name not in left]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": first["format"],
        "config_groups": groups,
        "ignore": targets(_linear(plan.floats), rounded),
    }


def _linear(modules: Sequence[str]) -> list[str]:
    """Without embeddings, which are no linear layers; a head is one, tied or not."""
    return list(dict.fromkeys([*(m for m in modules if "embed" not in m), "lm_head"]))


@dataclass(frozen=True)
class OtherFiles:
    """The files of a folder besides its weights.

    Attributes:
        files: name -> content, or the file to copy.
        config: config.json without quantization_config.
    """

    files: Mapping[str, bytes | Path]
    config: Mapping[str, object]


def other_files_of(source: Path) -> OtherFiles:
    """The other files of a folder, and its configuration."""
    files: dict[str, bytes | Path] = {
        file.name: file
        for file in sorted(source.iterdir())
        if file.is_file() and file.name != _CONFIG and not file.name.endswith(_WEIGHTS)
    }
    config = cast(object, json.loads((source / _CONFIG).read_text(encoding="utf-8")))
    assert is_object(config)
    return OtherFiles(files, config)


def write_other_files(
    plan: QuantizePlan, layout: TargetLayout, others: OtherFiles, target: Path
) -> None:
    """Write the other files and the index, and config.json last: it makes the folder a model."""
    for name, content in others.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, target / name)
        else:
            (target / name).write_bytes(content)
    if len(plan.files) > 1:
        weights = {
            entry.name: file.name
            for file in plan.files
            for piece in file.pieces
            for unit in piece.units
            for entry in unit.entries
        }
        sizes = sum(p.end - p.start - len(p.head) for f in plan.files for p in f.pieces)
        index = {"metadata": {"total_size": sizes}, "weight_map": weights}
        (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = dict(others.config)
    if not isinstance(layout, Floats):
        config["quantization_config"] = quantization_config(plan, layout)
    (target / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
