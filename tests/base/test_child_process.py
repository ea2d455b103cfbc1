"""Children on real processes: duties, death notices, no orphans."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from banyan.base.child_process import Pulse, spawn
from banyan.base.errors import DeviceError

WAIT_S = 60


@pytest.fixture
def child_module(tmp_path, monkeypatch):
    """A module `obedient` that takes its duty, a path, writes to it and then sleeps."""
    source = """
        import sys, time
        from banyan.base.child_process import read_process_spec, watch_parent
        duty = read_process_spec()
        watch_parent()
        if duty == b"fail":
            sys.exit(7)
        open(duty.decode(), "wb").write(b"taken")
        time.sleep(600)
    """
    (tmp_path / "obedient.py").write_text(textwrap.dedent(source))
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{root}")
    return "obedient"


def wait_for_end(pid):
    """Until it is a zombie: its parent has yet to ask for the exit code."""
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        pass


def wait_for(path):
    while not path.exists():
        pass


def test_a_child_gets_its_orders_and_ends_when_stopped(child_module, tmp_path):
    deaths = []
    child = spawn(child_module, "engine", str(tmp_path / "taken").encode())
    child.watch(deaths.append)
    wait_for(tmp_path / "taken")
    child.stop()
    assert not child.is_alive() and deaths == []


def test_a_child_waits_for_orders_that_come_later(child_module, tmp_path):
    child = spawn(child_module, "engine")
    assert child.is_alive()
    child.assign(str(tmp_path / "taken").encode())
    wait_for(tmp_path / "taken")
    child.stop()


def test_a_child_that_ended_cannot_take_a_duty(child_module, tmp_path):
    child = spawn(child_module, "engine")
    os.kill(child.pid, signal.SIGKILL)
    wait_for_end(child.pid)
    with pytest.raises(DeviceError, match=r"engine \(pid \d+\) was killed by SIGKILL"):
        child.assign(b"anything")


def test_a_child_whose_parent_ended_before_it_began_ends_at_once(child_module):
    child = subprocess.Popen(
        [sys.executable, "-m", child_module], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.communicate(timeout=WAIT_S) == (None, b"") and child.returncode == 1


def test_an_unasked_end_is_reported_with_the_exit_code(child_module):
    deaths, called = [], threading.Event()
    child = spawn(child_module, "engine", b"fail")
    child.watch(lambda text: (deaths.append(text), called.set()))
    assert called.wait(WAIT_S)
    assert deaths == [f"engine (pid {child.pid}) ended with exit code 7"]


def test_a_killed_child_is_reported_with_the_signal(child_module, tmp_path):
    deaths, called = [], threading.Event()
    child = spawn(child_module, "rank1", str(tmp_path / "taken").encode())
    child.watch(lambda text: (deaths.append(text), called.set()))
    wait_for(tmp_path / "taken")
    os.kill(child.pid, signal.SIGKILL)
    assert called.wait(WAIT_S)
    assert deaths == [f"rank1 (pid {child.pid}) was killed by SIGKILL"]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_children_die_with_a_killed_parent(child_module, tmp_path, is_stopped):
    parent_source = f"""
        import sys, time
        from banyan.base.child_process import spawn
        child = spawn({child_module!r}, "engine", {str(tmp_path / "taken")!r}.encode())
        print(child.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_source)], stdout=subprocess.PIPE
    )
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for(tmp_path / "taken")
    if is_stopped:
        child.suspend()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child.wait(WAIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


COPIES = """
import os, sys, threading, time
from banyan.base.child_process import fork_spares, spawn, read_process_spec, watch_parent
spares = fork_spares(2)
if spares is None:  # write what is open into the file that the duty names
    path = read_process_spec().decode()
    held = len(os.listdir("/proc/self/fd"))
    watch_parent()
    open(path + ".new", "w").write(str(held))
    os.rename(path + ".new", path)
    time.sleep(600)
"""
"""A program with two copies of itself, of which the rest is the parent's."""


def test_copies_of_a_process_are_children_as_others(tmp_path):
    """Each takes a duty of its own; its end is reported; one that is asked to end does."""
    source = """
        paths = sys.argv[1:]
        children = [spawn("none", "rank", p.encode(), spare=s) for p, s in zip(paths, spares)]
        ended = threading.Event()
        children[0].watch(lambda text: (print(text, flush=True), ended.set()))
        print(*[child.pid for child in children], flush=True)
        ended.wait()
        children[1].stop()
        print(*[child.is_alive() for child in children], flush=True)
        time.sleep(600)
    """
    paths = [tmp_path / "0", tmp_path / "1"]
    parent = subprocess.Popen(
        [sys.executable, "-c", COPIES + textwrap.dedent(source), *map(str, paths)],
        stdout=subprocess.PIPE,
    )
    try:
        first, second = map(int, parent.stdout.readline().split())
        for path in paths:
            wait_for(path)
        assert paths[0].read_text() == paths[1].read_text(), "the second holds ends of the first"
        os.kill(first, signal.SIGKILL)
        assert parent.stdout.readline().decode() == f"rank (pid {first}) was killed by SIGKILL\n"
        assert parent.stdout.readline().decode() == "False False\n"
        assert not psutil.pid_exists(second)
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_copies_die_with_a_killed_parent(tmp_path, is_stopped):
    source = """
        child = spawn("none", "rank", sys.argv[1].encode(), spare=spares[0])
        print(child.pid, spares[1].pid, flush=True)
        time.sleep(600)
    """
    taken = tmp_path / "taken"
    parent = subprocess.Popen(
        [sys.executable, "-c", COPIES + textwrap.dedent(source), str(taken)],
        stdout=subprocess.PIPE,
    )
    copies = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    wait_for(taken)
    if is_stopped:
        copies[0].suspend()
    parent.kill()
    parent.communicate()
    for copy in copies:  # one with a duty, and one that waits for it
        copy.wait(WAIT_S)
        assert not copy.is_running() or copy.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("count", "num_warnings"), [(0, 0), (2, 1)])
def test_a_process_with_other_threads_is_not_forked(tmp_path, count, num_warnings):
    """Agents and debuggers start a thread before the program runs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], name='agent', daemon=True).start()\n"
    )
    code = f"""
        from banyan.base.log import start_logging
        from banyan.base.child_process import fork_spares
        start_logging("engine")
        print(fork_spares({count}))
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.stdout == "[]\n"
    warning = "ranks start as fresh processes, not as forks: other threads run (agent)"
    assert done.stderr.count(warning) == done.stderr.count("\n") == num_warnings


def test_a_pulse_tells_for_how_long_a_process_has_not_run(tmp_path):
    path = tmp_path / "pulse"
    code = f"""
import time
from banyan.base.child_process import Pulse
Pulse({str(path)!r}).keep_beating()
print("beating", flush=True)
time.sleep(600)
"""
    pulse = Pulse(str(path))
    pulse.beat()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"beating\n"
        while pulse.silence_s() > 0.3:
            pass
        os.kill(child.pid, signal.SIGSTOP)
        while pulse.silence_s() < 1.5:  # three beats that did not come
            pass
        os.kill(child.pid, signal.SIGCONT)
        while pulse.silence_s() > 0.3:
            pass
    finally:
        child.kill()
        child.wait()
