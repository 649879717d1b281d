"""Threads that end, and threads that yield."""

import os
import subprocess
import sys
import threading

import pytest

from specgw.threads import call_in_own_thread, yield_cores

ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="has no priorities of threads")

COUNT_THREADS = """
import os, sys, time, torch
from specgw.threads import call_in_own_thread

def compute():
    torch.ones(512, 512).add_(1.0)

def num_threads():
    return len(os.listdir("/proc/self/task"))

before = num_threads()
if sys.argv[1] == "own":
    call_in_own_thread(compute)
else:
    compute()
deadline = time.monotonic() + (10 if sys.argv[1] == "own" else 0.1)
while num_threads() > before and time.monotonic() < deadline:
    os.sched_yield()  # the workers end after their thread
print(num_threads() - before)
"""


def test_it_returns_what_the_function_returns_and_its_thread_has_ended() -> None:
    seen: list[threading.Thread] = []

    def add(a: int, *, b: int) -> int:
        seen.append(threading.current_thread())
        return a + b

    assert call_in_own_thread(add, 1, b=2) == 3
    assert seen[0] is not threading.current_thread()
    assert not seen[0].is_alive()


def test_it_raises_what_the_function_raises() -> None:
    def fail() -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        call_in_own_thread(fail)


@ONLY_LINUX
@pytest.mark.parametrize(("where", "leaves_workers"), [("own", False), ("here", True)])
def test_no_workers_of_openmp_are_left(where: str, leaves_workers: bool) -> None:
    """They would count against the threads that may wait busily, as those of this thread do."""
    command = [sys.executable, "-c", COUNT_THREADS, where]
    four_threads = {**os.environ, "OMP_NUM_THREADS": "4"}  # noqa: TID251
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=four_threads
    )

    assert (int(ended.stdout) > 0) == leaves_workers


@ONLY_LINUX
def test_a_thread_that_yields_hands_that_on_to_its_own_threads_alone() -> None:
    priorities: dict[str, int] = {}

    def note(name: str) -> None:
        priorities[name] = os.getpriority(os.PRIO_PROCESS, 0)

    def run() -> None:
        yield_cores()
        note("itself")
        started = threading.Thread(target=note, args=("started by it",))
        started.start()
        started.join()

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert priorities == {"itself": 19, "started by it": 19}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
