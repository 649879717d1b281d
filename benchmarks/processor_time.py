"""Reads from Linux how much processor time a process tree and the whole machine have used."""

import os
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """Returns the seconds that all cores together have been busy since boot."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / _TICKS_PER_SECOND


def tree_seconds(root_pid: int) -> float:
    """Returns the processor seconds that a process and its living descendants have used."""
    usage = _usage_by_pid()
    tree, frontier = {root_pid}, {root_pid}
    while frontier:
        frontier = {pid for pid, (parent, _) in usage.items() if parent in frontier} - tree
        tree |= frontier
    return sum(usage[pid][1] for pid in tree if pid in usage)


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
