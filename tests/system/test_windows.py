"""However the cache of layers with a window is laid out, the tokens are the same."""

from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.models.families import tiny

PROMPT = [2 + 7 * i % 60 for i in range(90)]
ASKED = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    tiny("gemma2", folder)
    return folder


def served(model: Path, **flags: object) -> tuple[list[int], dict[str, int]]:
    """The tokens, and the pages of each kind of group."""
    common = {"threads": 1, "max_total_tokens": 2048, "skip_tokenizer_init": True}
    with Engine(str(model), engine_mode="inprocess", **common, **flags) as engine:
        tokens = engine.generate(input_ids=PROMPT, sampling_params=ASKED)["output_ids"]
        groups = engine.get_server_info()["facts"]["memory"]["groups"]
        assert len(groups) == 2
        return tokens, {group["kind"]: group["num_pages"] - 1 for group in groups}


def test_every_layout_of_window_layers_gives_the_same_tokens(windowed: Path) -> None:
    tokens, pages = served(windowed)
    assert pages == {"window": 128, "full": 128}
    assert served(windowed, disable_hybrid_swa_memory=True) == (tokens, {"full": 128})
    assert served(windowed, swa_full_tokens_ratio=0.5) == (tokens, {"window": 64, "full": 128})
    mixed, pages = served(windowed, hybrid_kvcache_ratio=1.0)
    assert mixed == tokens and pages["window"] < 40
