"""Processes that die or stop at a random moment, and full disks: who is notified, and what remains.

FAULT_MOMENTS moments of each kind are tried (`make test-faults`: twelve), by default one. What
happens to engines and ranks stands in test_self_healing.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.system.serving import CALL_S, ROOT, launch, serving, wait_until

GROUPS = Path("/sys/fs/cgroup/memory")
MOMENTS = range(int(os.environ.get("FAULT_MOMENTS", "1")))


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_is_killed_at_any_moment_leaves_nothing(
    tiny_model, tmp_path, monkeypatch, moment
):
    place = tmp_path / "t"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    flags = ("--tp-size", "2") if moment % 2 else ()
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model), *flags)
    try:
        time.sleep(4 * random.Random(moment).random())  # the moment is what is tested
        os.kill(running.pid, signal.SIGKILL)
        running.exit_code(60.0)
        wait_until(lambda: running.members() == [], 60.0, "the children to end")
    finally:
        running.kill()
    for path in place.iterdir():
        os.utime(path, (1, 1))
    made = "from banyan.messages.transport import PrivateFolder as F; F().close()"
    subprocess.run([sys.executable, "-c", made], cwd=ROOT, check=True)
    assert [p.name for p in place.glob("banyan-*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_of_the_start_is_no_error(tiny_model, tmp_path, moment):
    running = launch(tmp_path / "server.log", "--model-path", str(tiny_model))
    try:
        wait_until(lambda: running.members() != [], CALL_S, "the engine to start")
        time.sleep(3 * random.Random(moment).random())  # the moment is what is tested
        os.kill(running.pid, signal.SIGTERM)
        assert running.exit_code(60.0) == 0
        wait_until(lambda: running.members() == [], 60.0, "the children to end")
    finally:
        running.kill()


def on_a_small_disk(folder: Path, code: str) -> str:
    """What a program prints whose folder DISK has 256 KiB, in a name space of its own."""
    script = (
        f"mount -t tmpfs -o size=256k none {folder} && "
        f"exec {sys.executable} -c {_quoted(textwrap.dedent(code))} {folder}"
    )
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no small disk can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _quoted(code: str) -> str:
    assert "'" not in code
    return f"'{code}'"


def test_a_journal_on_a_full_disk_is_refused_and_kills_nobody(tmp_path):
    output = on_a_small_disk(
        tmp_path,
        """
        import sys
        from banyan.base.errors import ConfigError
        from banyan.engine.journal import Journal
        from tests.scheduler.driver import asked
        try:
            Journal(sys.argv[1] + "/journal", asked(), 1 << 20)
        except ConfigError as error:
            print(error)
        """,
    )
    assert "No space left on device" in output and "--journal-bytes" in output


def test_files_and_answers_on_a_full_disk_are_refused_and_what_was_kept_stays(tmp_path):
    output = on_a_small_disk(
        tmp_path,
        """
        import asyncio, sys
        from pathlib import Path
        from banyan.base.errors import CapacityError, RequestError
        from banyan.server.store.batches import AnswerLog, answer_line
        from banyan.server.store.storage import Storage

        async def main():
            folder = Path(sys.argv[1])
            storage = await Storage(folder / "kept").ready()
            kept = await storage.files.add("a", "batch", b"x" * 50_000, "")
            try:
                await storage.files.add("b", "batch", b"x" * 400_000, "")
            except RequestError as error:
                print(error.status, error)
            log = AnswerLog(folder / "out", folder / "out")
            log.recover()
            answer = answer_line("r", "a", {"status_code": 200, "body": "y" * 40_000})
            written = 0
            try:
                for number in range(10):
                    log.append([(str(number), True, answer)])
                    written += 1
            except CapacityError as error:
                print(written, error)
            log.close()
            again = AnswerLog(folder / "out", folder / "out")
            again.recover()
            print(len((folder / "out").read_bytes()) == written * len(answer))
            print(await storage.files.content(kept.id) == b"x" * 50_000)
            print([f.id for f in storage.files.all("")] == [kept.id])

        asyncio.run(main())
        """,
    )
    lines = output.splitlines()
    assert lines[0].startswith("507 ") and "No space left" in lines[0]
    assert "No space left" in lines[1] and int(lines[1].split()[0]) > 0
    assert lines[2:] == ["True", "True", "True"]


@pytest.mark.slow
def test_an_engine_that_the_kernel_kills_for_its_memory_is_replaced(tiny_model, tmp_path):
    """As in a container at the limit of its memory."""
    group = GROUPS / f"banyan-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("memory groups cannot be made here")
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    try:
        with serving(tmp_path / "log", "--model-path", str(tiny_model)) as running:
            right = running.generate(**asked)["output_ids"]
            lost = running.engine_pid()
            (group / "memory.limit_in_bytes").write_text("65536")
            (group / "cgroup.procs").write_text(str(lost))
            wide = asked | {"input_ids": list(range(5, 305)), "return_logprob": True}

            def is_lost() -> bool:
                answer = running.http.post("/generate", json=wide | {"top_logprobs_num": 20})
                assert answer.status_code in (200, 503), answer.text
                return not os.path.exists(f"/proc/{lost}")

            wait_until(is_lost, CALL_S, "the kernel to kill it")
            wait_until(lambda: running.http.get("/health").status_code == 200, CALL_S, "another")
            assert running.engine_pid() != lost
            assert running.generate(**asked)["output_ids"] == right
            assert "SIGKILL" in running.log.read_text()
    finally:
        group.rmdir()
