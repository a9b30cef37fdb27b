"""Who sends what to whom along a context-parallel ring: packets of tensors between neighbours, with a time-out.

    states     rank r  --->  rank r + 1   (and the last to the first, where a rank has several pieces)
    gradients  rank r  <---  rank r + 1

Nothing here knows what a packet means. Alone in its group a rank hands packets to itself.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .lost import RankLost, with_first_cause

Direction = Literal["right", "left"]
"""Where a packet goes: states to the right, their gradients to the left."""

ALIGN = 16
"""bytes; every tensor of a packet begins at a multiple, so that it can be read in place"""

MICRO_BATCHES, BORDERS, LAYERS, SLOTS = 1 << 5, 1 << 10, 1 << 9, 1 << 6
"""Most that a tag tells apart; together with the direction 31 bits."""


class Key(NamedTuple):
    """Which packet: of which micro-batch, at the left border of which piece, of which layer, the how-manieth there."""

    micro_batch: int
    piece: int
    layer: int
    slot: int

    def tag(self, direction: Direction) -> int:
        """A number of its own for every packet that can be under way at once."""
        assert self.piece < BORDERS and self.layer < LAYERS and self.slot < SLOTS, self
        number = (self.micro_batch % MICRO_BATCHES * BORDERS + self.piece) * LAYERS + self.layer
        return (number * SLOTS + self.slot) * 2 + (direction == "left")


class NeighbourLost(RankLost):
    """A neighbour died, or nothing came from it in time."""


@dataclass
class Edges:
    """The process groups that packets travel in, for one context-parallel group.

    NCCL runs a communicator's operations in the order of issue, so the edge that closes the ring and the two
    directions have communicators of their own; gloo tells packets apart by tag and may use one group for all.
    """

    chain_right: Any
    wrap_right: Any
    chain_left: Any
    wrap_left: Any

    @classmethod
    def all_in(cls, group: Any) -> Edges:
        """Every edge in one group."""
        return cls(group, group, group, group)

    def pick(self, direction: Direction, wraps: bool) -> Any:
        """The group of one edge."""
        name = f"{'wrap' if wraps else 'chain'}_{direction}"
        return getattr(self, name)


@dataclass
class Wait:
    """One wait for a neighbour, for the idle share and the trace: `key`, direction, begin and end in seconds."""

    key: Key
    direction: Direction
    began: float
    ended: float


@dataclass
class StateRing:
    """This rank's two neighbours.

    edges    None where the rank is alone
    ranks    global ranks of the ring, in order; index: this rank's place among them
    timeout  seconds a packet is waited for
    where    this rank's coordinates, for messages
    """

    ranks: list[int]
    index: int
    edges: Edges | None = None
    timeout: float = 600.0
    where: str = ""
    waits: list[Wait] = field(default_factory=list)
    bytes_sent: int = 0
    _box: dict[tuple[Direction, Key], list[Tensor]] = field(default_factory=dict)
    _under_way: dict[Direction, deque[tuple[Any, Tensor, Key]]] = field(
        default_factory=lambda: {"right": deque(), "left": deque()}
    )

    @property
    def size(self) -> int:
        """Ranks in the ring."""
        return len(self.ranks)

    def send(self, direction: Direction, key: Key, tensors: Sequence[Tensor]) -> None:
        """Hand `tensors` on; returns at once. The packet is kept until it has gone.

        gloo can't be asked whether it has. So a packet is waited for when this rank is two pieces further: by then
        its receiver has most likely been there, and since it needs nothing that isn't sent, it will be.
        """
        if self.size == 1:
            assert (direction, key) not in self._box, f"{key} was sent twice"
            self._box[direction, key] = [x.detach() for x in tensors]
            return
        self._settle_older(direction, key)
        packet = pack(tensors)
        peer, group = self._edge(direction, outward=True)
        with self._blaming(direction, key, outward=True):
            work = dist.isend(packet, peer, group=group, tag=key.tag(direction))
        self._under_way[direction].append((work, packet, key))
        self.bytes_sent += packet.numel()

    def receive(self, direction: Direction, key: Key, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that were sent under `key`, of the shapes, dtypes and devices of `like`.

        Raises NeighbourLost naming who was waited for.
        """
        if self.size == 1:
            return self._box.pop((direction, key))
        packet = torch.empty(packed_bytes(like), dtype=torch.uint8, device=_wire(like))
        peer, group = self._edge(direction, outward=False)
        began = time.perf_counter()
        with self._blaming(direction, key, outward=False):
            work = dist.irecv(packet, peer, group=group, tag=key.tag(direction))
            assert work is not None
            work.wait(datetime.timedelta(seconds=self.timeout))
        self.waits.append(Wait(key, direction, began, time.perf_counter()))
        return unpack(packet, like)

    def finish(self) -> None:
        """Wait until all packets have gone; nothing may be left that nobody fetched."""
        for direction in self._under_way:
            while self._under_way[direction]:
                self._settle(direction)
        assert not self._box, f"packets that nobody fetched: {list(self._box)[:4]}"

    def drain_waits(self) -> list[Wait]:
        """The waits since the last call."""
        waits, self.waits = self.waits, []
        return waits

    @property
    def packets_under_way(self) -> int:
        """Packets that are kept since they may not have gone yet."""
        return sum(map(len, self._under_way.values()))

    def _settle_older(self, direction: Direction, key: Key) -> None:
        waiting = self._under_way[direction]
        while waiting and _long_ago(waiting[0][2], key, 2 * self.size):
            self._settle(direction)

    def _settle(self, direction: Direction) -> None:
        work, _, key = self._under_way[direction].popleft()
        with self._blaming(direction, key, outward=True):
            work.wait(datetime.timedelta(seconds=self.timeout))

    def _edge(self, direction: Direction, outward: bool) -> tuple[int, Any]:
        assert self.edges is not None
        step = 1 if (direction == "right") == outward else -1
        place = (self.index + step) % self.size
        wraps = abs(place - self.index) != 1 or (self.size == 2 and (self.index == 1) == (step == 1))
        return self.ranks[place], self.edges.pick(direction, wraps)

    def _blaming(self, direction: Direction, key: Key, outward: bool) -> _Blame:
        return _Blame(self, direction, key, outward)


WHAT = {"right": ("state", "forward"), "left": ("state's gradient", "backward")}


def _long_ago(sent: Key, now: Key, pieces: int) -> bool:
    """Whether `sent` is at least so many pieces, or two micro-batches, before `now`."""
    if sent.micro_batch != now.micro_batch:
        return now.micro_batch - sent.micro_batch >= 2
    return abs(sent.piece - now.piece) >= pieces


class _Blame:
    """Turns a failed exchange into NeighbourLost that says who, what, where; the first cause of all ranks is kept."""

    def __init__(self, ring: StateRing, direction: Direction, key: Key, outward: bool):
        self.ring, self.direction, self.key, self.outward = ring, direction, key, outward

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise NeighbourLost(self._story(error)) from error

    def _story(self, error: RuntimeError) -> str:
        ring, key = self.ring, self.key
        to_right = (self.direction == "right") == self.outward
        peer = ring.ranks[(ring.index + (1 if to_right else -1)) % ring.size]
        what, way = WHAT[self.direction]
        own = (
            f"rank {ring.ranks[ring.index]} ({ring.where}) lost its {'right' if to_right else 'left'} neighbour rank "
            f"{peer}: {'sending' if self.outward else 'waiting for'} the {what} of layer {key.layer}, piece {key.piece}"
            f" ({way}, part {key.slot}, micro-batch {key.micro_batch}), "
            f"after {time.monotonic() - self.began:.1f} s of at most {ring.timeout:.0f}"
        )
        if "losed by peer" in str(error):
            # A neighbour that gave up closes too: whoever it waited for in vain is told first.
            time.sleep(0.5)
        return with_first_cause(own) + f"\n({str(error).splitlines()[0][:200]})"


# -- packets -----------------------------------------------------------------------------------------
def _aligned(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // ALIGN) * ALIGN


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of a packet of such tensors."""
    return sum(_aligned(x) for x in tensors)


def _wire(tensors: Sequence[Tensor]) -> torch.device:
    """The device a packet travels from: that of the first tensor on an accelerator, else the CPU."""
    return next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """One uint8 tensor with the bytes of all, each from a multiple of ALIGN."""
    packet = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=_wire(tensors))
    for x, place in zip(tensors, unpack(packet, tensors, move=False), strict=True):
        place.copy_(x.detach())
    return packet


def unpack(packet: Tensor, like: Sequence[Tensor], *, move: bool = True) -> list[Tensor]:
    """Views into `packet` of the shapes and dtypes of `like`; those of other devices are moved there."""
    parts, offset = [], 0
    for x in like:
        size = x.numel() * x.element_size()
        part = packet[offset : offset + size].view(x.dtype).view(x.shape)
        parts.append(part.to(x.device) if move else part)
        offset += _aligned(x)
    return parts
