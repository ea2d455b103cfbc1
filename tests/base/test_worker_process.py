"""A child process that has stopped is noticed, at a task of any size, and one that works is not."""

import os
import signal
from pathlib import Path

import pytest

from banyan.base import child_process as children
from banyan.base.errors import RequestError
from banyan.chat_template.template import ChatTemplate
from banyan.tokenizer.encode import EncodeKind
from banyan.tokenizer.encode_processes import EncodeProcesses
from tests.system.checkpoint import write_tiny_model


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "STALL_S", 1.0)


def own() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


@pytest.mark.parametrize("size", [1, 1 << 18], ids=["small", "more than a pipe holds"])
def test_a_process_that_has_stopped_fails_its_task_and_is_replaced(
    tmp_path: Path, size: int
) -> None:
    before = own()
    processes = EncodeProcesses(str(write_tiny_model(tmp_path / "model")), 1)
    expected = processes.ids(["the banyan"], EncodeKind.PARSED)
    (stopped,) = own() - before
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RequestError) as refused:
        processes.ids(["x" * size], EncodeKind.PARSED)
    assert refused.value.code == "tokenizer_failure"
    assert processes.ids(["the banyan"], EncodeKind.PARSED) == expected
    assert stopped not in own()
    processes.close()


def test_a_process_that_computes_is_waited_for() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages[0].n %}" + endless + "{% endif %}ok", time_s=1.2)
    with pytest.raises(RequestError, match="longer than 1.2 s"):
        template.render([{"role": "user", "content": "x", "n": 1}])
    assert template.render([{"role": "user", "content": "x"}]) == "ok"
