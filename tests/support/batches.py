"""Batches of a server, and their files."""

import json

import openai
from openai.types import Batch

from tests.system.serving import wait_until

ENDPOINT = "/v1/chat/completions"


def line(id: str, url: str = ENDPOINT, **body: object) -> dict[str, object]:
    if url == ENDPOINT:
        body = {"messages": [{"role": "user", "content": id}], **body}
    return {"custom_id": id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def as_jsonl(lines: list[object]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def begin(client: openai.OpenAI, lines: list[object], endpoint: str = ENDPOINT) -> Batch:
    given = client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=given.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def ended(client: openai.OpenAI, batch: Batch, limit_s: float = 20) -> Batch:
    found = [batch]

    def is_over() -> bool:
        found[0] = client.batches.retrieve(batch.id)
        Batch.model_validate(found[0].model_dump(), strict=True)
        return found[0].status in ("completed", "failed", "cancelled")

    wait_until(is_over, limit_s, "the batch to end")
    return found[0]


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, dict]:
    """Answers of a file by custom_id, each of which must be there once."""
    if file_id is None:
        return {}
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {item["custom_id"]: item for item in found}
    assert len(by_id) == len(found)
    return by_id
