"""Every command line of SGLang's documents, as they are written, from `documented_lines.txt`.

A line above each names its page. IP and PORT stand for an address, M for a model, and `config.yaml`
for FLAG_FILE.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FLAG_FILE = """model-path: M
host: 0.0.0.0
port: 30000
tensor-parallel-size: 2
enable-metrics: true
log-requests: true
"""
_RANKS = ("--tp", "32")
LEFT_OUT = {"parameter guide: prefill": _RANKS, "parameter guide: decode": _RANKS}
"""Flags that a page leaves out: the guide's tables are for 32 devices and never write --tp."""
REFUSED_ON_NPU = {
    "server arguments: torchao": "weights are rounded at load on CPUs and GPUs only",
    "server arguments: fp8 weights": "no operator of Ascend NPUs multiplies weights of this form",
    "server arguments: fp8 pages": "pages have the type of the activations on Ascend NPUs",
    "server arguments: deterministic": "SGLang plans it for Ascend NPUs",
}
"""Line -> why it is refused there. The table of features says gpu-only, no, or planned."""


@dataclass(frozen=True)
class DocumentedLine:
    """
    Attributes:
        module: the module that `python3 -m` runs.
        words: flags and their values, as documented.
        variables: those that are set before the command.
    """

    module: str
    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, text: str) -> "DocumentedLine":
        words = shlex.split(text)
        command = words.index("python3")
        variables = dict(word.split("=", 1) for word in words[:command])
        return cls(words[command + 2], tuple(words[command + 3 :]), variables)

    def flags(self) -> Iterator[tuple[str, ...]]:
        """Each flag with its value."""
        starts = [at for at, word in enumerate(self.words) if word.startswith("--")]
        for start, end in zip(starts, [*starts[1:], len(self.words)], strict=True):
            yield self.words[start:end]

    @property
    def role(self) -> str:
        """ "prefill", "decode" or ""."""
        return next((flag[1] for flag in self.flags() if flag[0] == "--disaggregation-mode"), "")


def _read() -> dict[str, DocumentedLine]:
    lines = (Path(__file__).with_suffix(".txt")).read_text().splitlines()
    names = [line.removeprefix("# ") for line in lines[::2]]
    return {name: DocumentedLine.of(text) for name, text in zip(names, lines[1::2], strict=True)}


LINES = _read()
STARTS = {
    name: line
    for name, line in LINES.items()
    if line.module == "sglang.launch_server" and "--help" not in line.words
}
"""Starts of one server."""
