"""Reads from Linux what processes and the whole machine have used of processors and memory."""

import os
import socket
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def machine_seconds() -> float:
    """Returns the seconds that all cores together have been busy since boot."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / _TICKS_PER_SECOND


def process_seconds(pid: int) -> float:
    """Returns the processor seconds that one process has used."""
    return _usage_by_pid()[pid][1]


def thread_seconds(pid: int) -> dict[str, float]:
    """Returns the processor seconds of a service's event loop, its engine thread and the others."""
    seconds = {"loop": 0.0, "engine": 0.0, "others": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        name, _, rest = stat.partition("(")[2].rpartition(")")
        kind = "loop" if int(task.name) == pid else "engine" if name == "engine" else "others"
        fields = rest.split()
        seconds[kind] += (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
    return seconds


def resident_bytes(pid: int) -> int:
    """Returns the memory that a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def tree_peak_bytes(root_pid: int) -> int:
    """Returns the most memory that a process and its living descendants have held, each at most."""
    return sum(_peak_bytes(pid) for pid in _tree(root_pid))


def free_port() -> int:
    """Returns a TCP port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def tree_seconds(root_pid: int) -> float:
    """Returns the processor seconds that a process and its living descendants have used."""
    usage = _usage_by_pid()
    return sum(usage[pid][1] for pid in _tree(root_pid) if pid in usage)


def _tree(root_pid: int) -> set[int]:
    usage = _usage_by_pid()
    tree, frontier = {root_pid}, {root_pid}
    while frontier:
        frontier = {pid for pid, (parent, _) in usage.items() if parent in frontier} - tree
        tree |= frontier
    return tree


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it ended while we looked
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _usage_by_pid() -> dict[int, tuple[int, float]]:
    """Maps each process to its parent and its own processor seconds."""
    usage = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        fields = stat.rpartition(")")[2].split()  # the name before may hold spaces
        usage[int(entry.name)] = (
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        )
    return usage
