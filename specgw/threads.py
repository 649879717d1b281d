"""Where threads compute, and for whom they make room."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_LOWEST_PRIORITY = 19


def call_in_own_thread(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Returns what the function returns, or raises what it raises, after its thread has ended.

    A service that has an engine thread loads its model so. GNU OpenMP keeps workers for every
    thread that has computed, as long as that thread lives. While there are more of them than cores
    it lets none wait busily for the next operator, and a pass of a small model takes a fifth
    longer (`gomp_throttled_spin_count_var` in libgomp's team.c).
    """
    result: Future[_T] = Future()

    def call() -> None:
        try:
            result.set_result(function(*args, **kwargs))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=call, daemon=True)  # ctrl-C does not wait for it
    thread.start()
    wait([result])
    thread.join()
    return result.result()


def yield_cores() -> None:
    """Lets this thread, and those that it starts from now on, compute while others do not.

    The operators of two models that run at once on the same cores wait for one another's threads
    again and again, and both take far longer than in turn. Linux alone has priorities of threads.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)  # 0: the calling thread
