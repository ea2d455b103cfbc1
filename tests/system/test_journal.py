"""A journal of a real server replays without a difference."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.system.serving import CALL_S, ROOT, settled


def mixed_request(i: int) -> tuple[str, dict]:
    """Greedy and seeded, short and long, shared prefixes, streams and prompt scores."""
    prompt = [2 + (i % 3) * 50 + j % 300 for j in range(20 + 30 * (i % 7))]
    params = {"temperature": (i % 2) * 0.9, "sampling_seed": i, "max_new_tokens": 140 + i}
    body = {"input_ids": prompt, "sampling_params": params, "stream": i % 4 == 0}
    if i % 5 == 0:
        body |= {"return_logprob": True, "logprob_start_len": 0}
    return "/generate", body


def replay(journal) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "banyan", "replay", str(journal), "--check"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CALL_S)


def test_replaying_the_journal_of_20_mixed_requests_finds_no_difference(server, tmp_path):
    journal = tmp_path / "journal"
    flags = ("--max-total-tokens", "640", "--schedule-conservativeness", "0")
    with server("--journal", str(journal), *flags) as running:

        def ask(i: int) -> int:
            path, body = mixed_request(i)
            return httpx.post(running.url + path, json=body, timeout=CALL_S).status_code

        with ThreadPoolExecutor(20) as pool:  # all at once, so that pages run short
            assert list(pool.map(ask, range(20))) == [200] * 20
        assert settled(running.stats, 20)["retractions"] > 0
        subprocess.run(["kill", "-TERM", str(running.pid)], check=True)
        assert running.exit_code(60.0) == 0
    report = replay(journal)
    assert report.returncode == 0, report.stdout + report.stderr
    print(report.stdout)


def test_the_journal_of_a_killed_server_replays_up_to_its_end(server, tmp_path):
    journal = tmp_path / "journal"
    with server("--journal", str(journal)) as running:
        for i in range(4):
            path, body = mixed_request(i)
            assert httpx.post(running.url + path, json=body, timeout=CALL_S).status_code == 200
        subprocess.run(["kill", "-9", str(running.pid)], check=True)
    report = replay(journal)
    assert report.returncode == 0, report.stdout + report.stderr
