"""How much memory loading takes beside what is kept: `python -m benchmarks.load_memory`.

Writes checkpoints of random weights, some hundred MB each, starts an engine on each, and reads the
most that its process ever had resident (VmHWM, which counts pages of mapped files as well) less
that of an engine on a model of the same form with next to no weights. Beside it stands what stays
for the weights: private memory, less that of the small model, and what is mapped. The time is that
until an engine can serve, less that of the small model, from files that were just written. With
--llama also that of llama.cpp's server, which maps GGUF files, without a warm-up.
"""

import argparse
import contextlib
import shutil
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import banyan
from banyan.cli.quantize import quantize
from benchmarks import random_experts, random_floats

MIB = 1 << 20
FORMS = (*random_floats.FORMS, "gguf-q4_k", "expert-gguf")
LAYERS = 16
_SIZES: dict[str, Any] = {
    "max_total_tokens": 256,
    "context_length": 128,
    "chunked_prefill_size": 64,
    "max_running_requests": 1,
}


@dataclass(frozen=True)
class Resident:
    """Bytes of one process: the most there ever was, and what is there now; and how long it took
    until it could serve."""

    most: int
    private: int
    files: int
    seconds: float

    @classmethod
    def of(cls, pid: int, seconds: float) -> "Resident":
        found = dict[str, int]()
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmHWM", "RssAnon", "RssFile"):
                found[name] = int(value.split()[0]) << 10
        return cls(found["VmHWM"], found["RssAnon"], found["RssFile"], seconds)


def measured(path: str) -> Resident:
    """Of the engine's process, ready to serve."""
    began = time.perf_counter()
    with banyan.Engine(
        model_path=path, skip_tokenizer_init=True, log_level="error", **_SIZES
    ) as engine:
        assert engine is not None
        seconds = time.perf_counter() - began
        children = psutil.Process().children(recursive=True)
        found = [Resident.of(child.pid, seconds) for child in children]
    return max(found, key=lambda one: one.private)


def seconds_of_llama(server: str, path: str) -> float:
    """Until llama.cpp's server is healthy."""
    words = [*("--port", "8199", "-t", "2", "-c", "256"), "--no-warmup", "-np", "1"]
    began = time.perf_counter()
    with subprocess.Popen(
        [server, "-m", path, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while process.poll() is None:
                try:
                    with urllib.request.urlopen("http://127.0.0.1:8199/health", timeout=5):
                        return time.perf_counter() - began
                except OSError:
                    time.sleep(0.01)
        finally:
            process.terminate()
    raise SystemExit(f"{server} ended with {process.returncode}")


def write_bytes_as_words(folder: Path) -> None:
    """A vocabulary of single bytes, which llama.cpp wants of a file."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pair = f"{letters[0]}{letters[1]}"
    vocabulary = {word: at for at, word in enumerate([*letters, pair])}
    words = Tokenizer(models.BPE(vocabulary, [(letters[0], letters[1])]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.save(str(folder / "tokenizer.json"))


def write(form: str, path: Path, is_small: bool) -> str:
    layers = 2 if is_small else LAYERS
    if form == "expert-gguf":
        file = f"{path}.gguf"
        random_experts.small(file, layers) if is_small else random_experts.narrow(file, layers)
        return file
    plain = "bf16" if form == "gguf-q4_k" else form
    random_floats.write(plain, str(path), layers, *((256, 512) if is_small else ()))
    if form != "gguf-q4_k":
        return str(path)
    write_bytes_as_words(path)
    words = [f"{path}.gguf", "--type", "q4_k", "--no-report"]
    with contextlib.redirect_stdout(None):
        quantize([str(path), *words])
    shutil.rmtree(path)
    return f"{path}.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=FORMS, metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--llama", default="", help="llama-server, to load GGUF files as well")
    args = parser.parse_args()
    print("| checkpoint | files, MiB | kept, MiB | peak, MiB | peak / kept | seconds | llama.cpp |")
    print("|---|---|---|---|---|---|---|")
    for form in args.forms:
        with tempfile.TemporaryDirectory(prefix="banyan-load-") as folder:
            paths = [write(form, Path(folder, "small"), True)]
            paths += [write(form, Path(folder, "large"), False)]
            small, large = measured(paths[0]), measured(paths[1])
            theirs = "–"
            if args.llama and paths[1].endswith(".gguf"):
                seconds = [seconds_of_llama(args.llama, path) for path in paths]
                theirs = f"{seconds[1] - seconds[0]:.2f}"
            files = sum(f.stat().st_size for f in Path(folder).glob("large*/*.safetensors"))
            files = files or Path(paths[1]).stat().st_size
        kept = large.private - small.private + max(0, large.files - small.files)
        peak = large.most - small.most
        sizes = " | ".join(f"{size / MIB:,.0f}" for size in (files, kept, peak))
        seconds = large.seconds - small.seconds
        print(f"| {form} | {sizes} | {peak / kept:.3f} | {seconds:.2f} | {theirs} |", flush=True)


if __name__ == "__main__":
    main()
