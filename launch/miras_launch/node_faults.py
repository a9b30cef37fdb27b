"""From the facts of all ranks to what is wrong, and with which machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .node_facts import Facts


def find_faults(ranks: Sequence[Facts], *, gpus: int, free_gib: float, clock: float) -> list[str]:
    """One line for each fault, the machine's name first.

    gpus      devices a machine must show
    free_gib  space that every folder must have, GiB
    clock     seconds that clocks may differ
    """
    nodes = [facts for facts in ranks if facts.first]
    lines = [f"{facts.node}: {fault}" for facts in ranks for fault in facts.faults]
    for part in (_versions(nodes), _gpus(nodes, gpus), _disks(nodes, free_gib), _clocks(nodes, clock)):
        lines += part
    return list(dict.fromkeys(lines))


def _versions(nodes: Sequence[Facts]) -> Iterator[str]:
    """What most have is right; among as many the first machine's."""
    for name in dict.fromkeys(name for facts in nodes for name in facts.versions):
        usual = _usual([facts.versions.get(name, "none") for facts in nodes])
        for facts in nodes:
            if (own := facts.versions.get(name, "none")) != usual:
                yield f"{facts.node}: versions: {name} {own}, where others have {usual}"


def _gpus(nodes: Sequence[Facts], gpus: int) -> Iterator[str]:
    usual = _usual([facts.gpu for facts in nodes])
    for facts in nodes:
        if facts.gpus < gpus:
            yield f"{facts.node}: GPUs: shows {facts.gpus} of {gpus}; nvidia-smi there says which is missing"
        elif facts.gpu != usual:
            yield f"{facts.node}: GPUs: {facts.gpu or 'none'}, where others have {usual or 'none'}"


def _disks(nodes: Sequence[Facts], free_gib: float) -> Iterator[str]:
    for facts in nodes:
        for folder, free in facts.free_gib.items():
            if free < free_gib:
                yield f"{facts.node}: disk: {folder} has {free:.1f} GiB free, {free_gib:g} are wanted (free_gib)"


def _clocks(nodes: Sequence[Facts], most: float) -> Iterator[str]:
    """Off the middle clock: one that is wrong doesn't make the others look so."""
    middle = sorted(facts.clock for facts in nodes)[(len(nodes) - 1) // 2]
    for facts in nodes:
        if abs(facts.clock - middle) > most:
            off = f"{facts.clock - middle:+.1f} s off the others'"
            yield f"{facts.node}: clock: {off}, {most:g} are allowed; is NTP running?"


def find_unseen(marks: Mapping[str, Sequence[str]], folder: str) -> list[str]:
    """Machines where `folder` isn't the folder of the one that most see, among as many the first.

    marks   machine -> machines whose mark it finds in the folder
    """
    usual = max(marks, key=lambda node: sum(node in seen for seen in marks.values()))
    return [
        f"{node}: shared folder: {folder} there isn't that of {usual}; put run.dir on a disk that all machines share"
        for node, seen in marks.items()
        if usual not in seen or node not in marks[usual]
    ]


def find_unreachable(failures: Mapping[str, Sequence[str]]) -> list[str]:
    """Machines that explain the failed connections, the one with most of them first, among as many the last.

    failures   machine -> machines that it could not connect to
    """
    broken = {(node, other) for node, missed in failures.items() for other in missed}
    lines = []
    while broken:
        worst = max(reversed(list(failures)), key=lambda node: sum(node in pair for pair in broken))
        to_it = sorted(node for node, other in broken if other == worst)
        from_it = sorted(other for node, other in broken if node == worst)
        said = [f"{_some(to_it)} can't connect to it"] if to_it else []
        said += [f"it can't connect to {_some(from_it)}"] if from_it else []
        lines.append(f"{worst}: network: {'; '.join(said)}; is a firewall between?")
        broken = {pair for pair in broken if worst not in pair}
    return lines


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _usual(values: Sequence[str]) -> str:
    return Counter(values).most_common(1)[0][0] if values else ""
