"""Which segments of which documents are worked on together, when segments must follow one another.

A *lane* is one document (the first of a row may go on inside an open segment). Lanes are independent, so
step j takes segment j of every lane that has one, in groups of equal place and length. A lane whose end
state nobody needs may be padded to its group's length: everything is causal, so what pads do is never seen.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from .documents import Documents


@dataclass(frozen=True)
class Group:
    """Segments worked on at once: `length` tokens each, the first at place `first` of its segment.

    lanes   numbers of the lanes, one row of the group each
    tokens  [lanes, length] int64, where they are in the flattened [B T] tokens (pads point anywhere)
    real    [lanes] how many of them are tokens
    """

    lanes: tuple[int, ...]
    first: int
    length: int
    tokens: Tensor
    real: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Groups in the order they are walked.

    fresh  per lane whether it starts a document; else it goes on from its row's state
    rows   per lane its batch row
    last   per batch row the lane of its last document
    end_states  whether the state after those is wanted
    """

    groups: tuple[Group, ...]
    fresh: tuple[bool, ...]
    rows: tuple[int, ...]
    last: tuple[int, ...]
    end_states: bool

    @property
    def order(self) -> Tensor:
        """[sum of lanes x length] int64: the flattened tokens, group after group."""
        return torch.cat([group.tokens.flatten() for group in self.groups])

    def back(self, tokens: int) -> Tensor:
        """[B T] int64: where each of the `tokens` = B T tokens is in `order`."""
        place, offset = torch.zeros(tokens, dtype=torch.int64), 0
        for group in self.groups:
            for index, real in zip(group.tokens, group.real, strict=True):
                place[index[:real]] = torch.arange(offset, offset + real)
                offset += group.length
        return place


@dataclass
class _Lane:
    row: int
    start: int
    stop: int
    place: int
    exact: bool


def plan_segments(
    documents: Documents | None, batch: int, tokens: int, segment: int, places: list[int] | None, end_states: bool
) -> Plan:
    """The groups of B rows of T tokens; `places` says how far into a segment each row stands (None: fresh rows).

    With `end_states` the last document of a row is never padded.
    """
    starts = documents.starts if documents is not None else ((0,),) * batch
    lanes, last = [], []
    for row, begins in enumerate(starts):
        for start, stop in zip(begins, [*begins[1:], tokens], strict=True):
            place = places[row] if places is not None and start == 0 else 0
            lanes.append(_Lane(row, start, stop, place, end_states and stop == tokens))
        last.append(len(lanes) - 1)
    fresh = tuple(places is None or lane.start > 0 for lane in lanes)
    return Plan(
        tuple(_groups(lanes, tokens, segment)), fresh, tuple(lane.row for lane in lanes), tuple(last), end_states
    )


def _groups(lanes: list[_Lane], tokens: int, segment: int) -> list[Group]:
    pieces = [_pieces(lane, segment) for lane in lanes]
    groups = []
    for step in range(max(len(p) for p in pieces)):
        together: dict[tuple[int, int | None], list[int]] = defaultdict(list)
        for number, lane in enumerate(lanes):
            if step < len(pieces[number]):
                first, start, stop = pieces[number][step]
                whole = first + stop - start == segment
                together[first, stop - start if lane.exact and not whole else None].append(number)
        groups += [_group(members, lanes, pieces, step, tokens) for members in together.values()]
    return groups


def _pieces(lane: _Lane, segment: int) -> list[tuple[int, int, int]]:
    """(place in the segment, first token, end) of each of a lane's segments."""
    pieces, first, start = [], lane.place, lane.start
    while start < lane.stop:
        stop = min(lane.stop, start + segment - first)
        pieces.append((first, start, stop))
        first, start = 0, stop
    return pieces


def _group(
    members: list[int], lanes: list[_Lane], pieces: list[list[tuple[int, int, int]]], step: int, tokens: int
) -> Group:
    spans = [pieces[number][step] for number in members]
    real = tuple(stop - start for _, start, stop in spans)
    length = max(real)
    offset = torch.tensor([lanes[n].row * tokens + start for n, (_, start, _) in zip(members, spans, strict=True)])
    run = torch.minimum(torch.arange(length), torch.tensor(real)[:, None] - 1)
    return Group(tuple(members), spans[0][0], length, offset[:, None] + run, real)
