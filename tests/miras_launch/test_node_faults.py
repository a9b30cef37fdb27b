"""If these fail, the preflight blames the wrong machine of a thousand, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from miras_launch.node_facts import Facts
from miras_launch.node_faults import find_faults, find_unreachable, find_unseen

GOOD = [
    Facts(
        rank=rank, node=f"n{rank}", versions={"torch": "2.13.0"}, clock=100.0, gpus=8, gpu="H200", free_gib={"/r": 90.0}
    )
    for rank in range(4)
]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"versions": {"torch": "2.12.0"}}, "n2: versions: torch 2.12.0, where others have 2.13.0"),
        ({"versions": {"torch": "2.13.0", "triton": "3.7"}}, "n2: versions: triton 3.7, where others have none"),
        ({"gpus": 7}, "n2: GPUs: shows 7 of 8"),
        ({"gpu": "A100"}, "n2: GPUs: A100, where others have H200"),
        ({"free_gib": {"/r": 3.0}}, "n2: disk: /r has 3.0 GiB free, 10 are wanted"),
        ({"clock": 160.5}, "n2: clock: +60.5 s off the others', 5 are allowed"),
        ({"faults": ["compiler: cc makes nothing"]}, "n2: compiler: cc makes nothing"),
    ],
    ids=lambda x: x.split(":")[1].strip() if isinstance(x, str) else "",
)
def test_each_fault_names_its_machine_and_no_other(change: dict[str, object], fault: str) -> None:
    """One machine of four is wrong: it is named, once."""
    ranks = [*GOOD[:2], replace(GOOD[2], **change), GOOD[3]]
    (line,) = find_faults(ranks, gpus=8, free_gib=10, clock=5)
    assert line.startswith(fault)


def test_machines_that_are_alike_and_well_have_no_fault() -> None:
    """A preflight that cries wolf is turned off."""
    later = [replace(facts, clock=100.0 + facts.rank) for facts in GOOD]
    assert find_faults(later, gpus=8, free_gib=10, clock=5) == []


def test_other_ranks_of_a_machine_tell_of_their_own_gpu_only() -> None:
    """Their empty facts are no missing versions."""
    second = Facts(rank=4, node="n0", first=False, faults=["GPUs: cuda:1 computes a wrong product"])
    assert find_faults([*GOOD, second], gpus=8, free_gib=10, clock=5) == ["n0: GPUs: cuda:1 computes a wrong product"]


def test_a_folder_that_is_not_shared_names_who_is_alone_with_it() -> None:
    """Three see each other's marks, the fourth has a folder of its own under the same name."""
    all_but = ["a", "b", "d"]
    assert find_unseen({"a": all_but, "b": all_but, "c": ["c"], "d": all_but}, "/r") == [
        "c: shared folder: /r there isn't that of a; put run.dir on a disk that all machines share"
    ]
    assert find_unseen({"a": ["a", "b"], "b": ["a", "b"]}, "/r") == []
    assert [line[0] for line in find_unseen({"a": ["a"], "b": ["b"]}, "/r")] == ["b"]


def test_broken_connections_name_the_machine_that_explains_most() -> None:
    """A firewall on one machine breaks connections of all others; they are well."""
    one_deaf = {"a": ["c"], "b": ["c"], "c": [], "d": ["c"]}
    assert find_unreachable(one_deaf) == ["c: network: a, b, d can't connect to it; is a firewall between?"]
    cut_off = {"a": ["c"], "b": ["c"], "c": ["a", "b"]}
    (line,) = find_unreachable(cut_off)
    assert line.startswith("c: network: a, b can't connect to it; it can't connect to a, b")
    two = {"a": ["b"], "b": [], "c": ["d"], "d": []}
    assert [line[0] for line in find_unreachable(two)] == ["d", "b"]
    assert find_unreachable({"a": [], "b": []}) == []
