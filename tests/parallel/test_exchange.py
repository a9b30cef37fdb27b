"""Packets between neighbours: what is sent is what arrives, told apart from all others, and a loss is told by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.worlds import run_world

from miras_megatron.config.schema import Parallel
from miras_megatron.parallel.exchange import Edges, Key, NeighbourLost, StateRing, pack, packed_bytes, unpack
from miras_megatron.parallel.mesh import ParallelMesh


def mixed() -> list[torch.Tensor]:
    """Dtypes and shapes of a state: scalars, an empty tail, odd sizes, views."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.tensor([3, 1]),
        torch.randn(2, 3, 5, generator=generator),
        torch.randn(2, 0, 4, generator=generator),
        torch.randn(7, generator=generator).bfloat16(),
        torch.randn(3, 4, dtype=torch.float64, generator=generator).t(),
        torch.tensor(True),
    ]


def test_a_packet_holds_its_tensors_bit_for_bit() -> None:
    """A state that changes on its way makes another model."""
    tensors = mixed()
    packet = pack(tensors)
    assert packet.numel() == packed_bytes(tensors)
    for got, sent in zip(unpack(packet, tensors), tensors, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent)


def test_no_two_packets_share_a_tag() -> None:
    """gloo hands a receiver whatever has its tag."""
    keys = [Key(*place) for place in itertools.product((0, 1, 31), (0, 1, 1023), (1, 2, 511), (0, 1, 63))]
    tags = [key.tag(direction) for key in keys for direction in ("right", "left")]
    assert len(set(tags)) == len(tags) and max(tags) < 2**31


def test_a_rank_alone_hands_packets_to_itself() -> None:
    """World size 1 takes the same path."""
    ring = StateRing([0], 0)
    key = Key(0, 1, 2, 0)
    ring.send("right", key, mixed())
    with pytest.raises(AssertionError, match="nobody fetched"):
        ring.finish()
    assert all(map(torch.equal, ring.receive("right", key, mixed()), mixed()))
    ring.finish()


def pass_around(rounds: int) -> float:
    """Every rank sends to both sides in one order and receives in the other; the sum of what came."""
    with ParallelMesh(Parallel(context=torch.distributed.get_world_size()), device="cpu") as mesh:
        ring, like = mesh.ring, [torch.zeros(50_000), torch.zeros(2, dtype=torch.int64)]
        for number in range(rounds):
            for direction in ("right", "left"):
                ring.send(direction, Key(number, 0, 1, 0), [x + ring.index + number for x in like])
        total = 0.0
        for number in reversed(range(rounds)):
            for direction in ("left", "right"):
                total += sum(float(x.double().mean()) for x in ring.receive(direction, Key(number, 0, 1, 0), like))
        ring.finish()
        assert ring.bytes_sent > 0 and len(ring.drain_waits()) == 2 * rounds and ring.drain_waits() == []
    return total


@pytest.mark.parametrize("size", [2, 3])
def test_packets_cross_in_any_order(size: int) -> None:
    """Blocking sends would deadlock here; wrong neighbours would change the sum."""
    rounds = 2
    for rank, total in enumerate(run_world(size, pass_around, rounds)):
        neighbours = (rank - 1) % size + (rank + 1) % size
        assert total == sum(2 * (neighbours + 2 * number) for number in range(rounds))


def wait_in_vain() -> str:
    """Rank 0 waits for a packet that rank 1 never sends."""
    with ParallelMesh(Parallel(context=2), device="cpu", timeout=600) as mesh:
        ring = StateRing(mesh.ring.ranks, mesh.ring.index, Edges.all_in(mesh.groups.cp), 0.5, mesh.coordinates)
        if ring.index == 1:
            torch.distributed.distributed_c10d._get_default_store().wait(["gave_up"])
            return ""
        try:
            ring.receive("right", Key(4, 2, 3, 1), [torch.zeros(8)])
        except NeighbourLost as lost:
            torch.distributed.distributed_c10d._get_default_store().set("gave_up", "")
            return str(lost)
    return "something came"


def test_a_wait_ends_and_names_who_was_waited_for() -> None:
    """Else a stuck run holds its machines for ever, and nobody knows which rank to look at."""
    said = run_world(2, wait_in_vain)[0]
    for part in (
        "rank 0 (dp0 pp0 cp0 tp0)",
        "left neighbour rank 1",
        "layer 3, piece 2 (forward, part 1, micro-batch 4)",
    ):
        assert part in said, said
