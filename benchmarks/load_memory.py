"""How much memory loading takes beside what is kept: `python -m benchmarks.load_memory`.

Writes checkpoints of random weights, some hundred MB each, starts an engine on each, and reads the
most that its process ever had resident (VmHWM, which counts pages of mapped files as well) less
that of an engine on a model of the same form with next to no weights. Beside it stands what stays
for the weights: private memory, less that of the small model, and what is mapped.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

import banyan
from benchmarks import random_experts, random_floats

MIB = 1 << 20
FORMS = (*random_floats.FORMS, "expert-gguf")
_SIZES = {
    "max_total_tokens": 256,
    "context_length": 128,
    "chunked_prefill_size": 64,
    "max_running_requests": 1,
}


@dataclass(frozen=True)
class Resident:
    """Bytes of one process: the most there ever was, and what is there now."""

    most: int
    private: int
    files: int

    @classmethod
    def of(cls, pid: int) -> "Resident":
        found = dict[str, int]()
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmHWM", "RssAnon", "RssFile"):
                found[name] = int(value.split()[0]) << 10
        return cls(found["VmHWM"], found["RssAnon"], found["RssFile"])


def measured(path: str) -> Resident:
    """Of the engine's process, ready to serve."""
    with banyan.Engine(
        model_path=path, skip_tokenizer_init=True, log_level="error", **_SIZES
    ) as engine:
        assert engine is not None
        children = psutil.Process().children(recursive=True)
        found = [Resident.of(child.pid) for child in children]
    return max(found, key=lambda one: one.private)


def write(form: str, path: Path, is_small: bool) -> str:
    layers = 2 if is_small else 16
    if form != "expert-gguf":
        random_floats.write(form, str(path), layers, *((128, 256) if is_small else ()))
        return str(path)
    file = f"{path}.gguf"
    random_experts.small(file, layers) if is_small else random_experts.narrow(file, layers)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=FORMS, metavar="FORM", help=", ".join(FORMS))
    print("| checkpoint | files, MiB | kept, MiB | peak, MiB | peak / kept |")
    print("|---|---|---|---|---|")
    for form in parser.parse_args().forms:
        with tempfile.TemporaryDirectory(prefix="banyan-load-") as folder:
            small = measured(write(form, Path(folder, "small"), True))
            path = write(form, Path(folder, "large"), False)
            files = sum(f.stat().st_size for f in Path(folder).glob("large*/*.safetensors"))
            files = files or Path(path).stat().st_size
            large = measured(path)
        kept = large.private - small.private + max(0, large.files - small.files)
        peak = large.most - small.most
        sizes = " | ".join(f"{size / MIB:,.0f}" for size in (files, kept, peak))
        print(f"| {form} | {sizes} | {peak / kept:.3f} |", flush=True)


if __name__ == "__main__":
    main()
