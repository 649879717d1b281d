"""Calls a function in a thread that ends with it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def call_in_own_thread(
    function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    """Returns what the function returns, or raises what it raises, after its thread has ended.

    A service that has an engine thread loads its model so. GNU OpenMP keeps workers for every
    thread that has computed, as long as that thread lives. While there are more of them than cores
    it lets none wait busily for the next operator, and a pass of a small model takes a fifth
    longer (`gomp_throttled_spin_count_var` in libgomp's team.c).
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(function, *args, **kwargs).result()
