"""A batch of 1,000 lines through a real server that is killed in the middle, and started again."""

import signal
from pathlib import Path

import openai
import pytest

from tests.support.batches import answers, begin, ended, line
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import serving, wait_until

NUM_LINES = 1000


@pytest.mark.slow
def test_a_killed_server_answers_every_line_exactly_once(tmp_path: Path) -> None:
    model, kept = write_tiny_model(tmp_path / "model"), tmp_path / "kept"
    flags = ["--model-path", str(model), "--threads", "1", "--max-total-tokens", "16384"]
    flags += ["--max-running-requests", "64", "--file-storage-path", str(kept)]
    lines = [line(f"line {i}", max_tokens=2, ignore_eos=True) for i in range(NUM_LINES)]
    with serving(tmp_path / "first.log", *flags) as first:
        client = openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0)
        batch = begin(client, lines)

        def is_half_done() -> bool:
            return client.batches.retrieve(batch.id).request_counts.completed >= NUM_LINES // 3

        wait_until(is_half_done, 60, "a third of the lines")
        first.signal(signal.SIGKILL)
        first.exit_code(60)
    num_written = sum(p.read_bytes().count(b"batch_req_") for p in kept.glob("file-*"))
    assert NUM_LINES // 3 <= num_written < NUM_LINES
    with serving(tmp_path / "second.log", *flags) as second:
        client = openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        batch = ended(client, batch, limit_s=60)
        found = answers(client, batch.output_file_id)
        assert second.stats()["finished"] <= NUM_LINES - num_written + 1, "nothing is asked twice"
    assert batch.status == "completed" and batch.error_file_id is None
    assert batch.request_counts.completed == batch.request_counts.total == NUM_LINES
    assert sorted(found) == sorted(f"line {i}" for i in range(NUM_LINES))
    usages = {a["response"]["body"]["usage"]["completion_tokens"] for a in found.values()}
    assert usages == {2}
