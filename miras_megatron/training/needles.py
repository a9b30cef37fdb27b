"""Needles: facts planted into training rows and asked for later, and the test that asks for one over any length.

A mention is marker + key + value, such as "@Q7". The first mention of a key tells its value, later ones ask
for it: after "@Q" the model should say 7. Who answers beyond the reach of attention has remembered.
Bytes only: ids are byte values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config.schema import Needles, Run
from .batch import Row
from .data import RowTransform

DEPTHS = 4
"""equal parts of the text before the question, from its start, for which accuracy is also reported"""
CUT = 512
"""tokens that a stream reads at once"""
FULL_SAMPLES_UP_TO = 16
"""beyond so many rows a quarter of the questions is asked, since each costs as much as all shorter ones"""
LETTERS = range(ord("A"), ord("Z") + 1)
"""bytes of keys: capitals, since filler is full of small letters, which would be written as keys too"""


def plant_needles(needles: Needles) -> RowTransform:
    """The row transform that plants `needles.per_row` facts, each asked `needles.questions` times.

    Mentions overwrite text at random places of the row's longest document, never over its border. What can't be
    known (keys, and values told for the first time) has weight 0, answers have `needles.answer_weight`.
    """

    def transform(sample: int, row: Row, generator: torch.Generator) -> Row:
        if float(torch.rand((), generator=generator)) >= needles.rows:
            return row
        start, stop = longest_document(row)
        return _plant(row, start, stop, needles, generator)

    return transform


def longest_document(row: Row) -> tuple[int, int]:
    """[start, stop) of the longest run of the row's T + 1 tokens without a document start."""
    borders = [0, *row.starts.tolist(), len(row.tokens)]
    return max(zip(borders, borders[1:], strict=False), key=lambda span: span[1] - span[0])


def mention_bytes(needles: Needles) -> int:
    """Length of a mention."""
    return len(needles.marker.encode()) + needles.key_bytes + 1


def draw_keys(needles: Needles, count: int, generator: torch.Generator) -> Tensor:
    """[count, key_bytes] int64 letters, all keys different. Raises ValueError where there are not so many."""
    kinds = len(LETTERS) ** needles.key_bytes
    if count > kinds:
        raise ValueError(
            f"data.needles.per_row = {count}: there are {kinds} keys of data.needles.key_bytes = {needles.key_bytes}; "
            f"plant fewer, or lengthen the keys"
        )
    picked = torch.randperm(kinds, generator=generator)[:count]
    digits = [picked // len(LETTERS) ** place % len(LETTERS) for place in reversed(range(needles.key_bytes))]
    return torch.stack(digits, 1) + LETTERS.start


def draw_values(needles: Needles, count: int, generator: torch.Generator) -> Tensor:
    """[count] int64 bytes of the alphabet."""
    letters = alphabet(needles)
    return letters[torch.randint(len(letters), (count,), generator=generator)]


def alphabet(needles: Needles) -> Tensor:
    """The bytes that values are, int64."""
    return torch.tensor(list(needles.alphabet.encode()))


def _plant(row: Row, start: int, stop: int, needles: Needles, generator: torch.Generator) -> Row:
    width, asked = mention_bytes(needles), 1 + needles.questions
    count = min(needles.per_row, (stop - start) // (2 * width * asked) or 1)
    if (stop - start) < count * asked * width:
        return row
    tokens, mask = row.tokens.clone(), row.loss_mask.clone()
    keys, values = draw_keys(needles, count, generator), draw_values(needles, count, generator)
    places = start + draw_places(count * asked, stop - start, width, generator)
    told: set[int] = set()
    for place, fact in zip(places.tolist(), _draw_order(count, asked, generator), strict=True):
        tokens[place : place + width] = _mention(needles, keys[fact], values[fact])
        mask[place : place + width] = 0.0
        mask[place + width - 1] = needles.answer_weight if fact in told else 0.0
        told.add(fact)
    return Row(tokens, mask, row.starts, row.reset)


def draw_places(count: int, room: int, width: int, generator: torch.Generator) -> Tensor:
    """[count] ascending starts of pieces of `width` that fit into `room` tokens without touching each other's."""
    gaps = torch.randint(room - count * width + 1, (count,), generator=generator).sort().values
    return gaps + width * torch.arange(count)


def _draw_order(facts: int, mentions: int, generator: torch.Generator) -> list[int]:
    """Which fact each place mentions."""
    order = torch.randperm(facts * mentions, generator=generator) % facts
    return [int(fact) for fact in order]


def _mention(needles: Needles, key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([torch.tensor(list(needles.marker.encode())), key, value[None]])


# -- the test: one needle, one question at the end ---------------------------------------------------------------


@dataclass(frozen=True)
class NeedleScore:
    """How often the value of a single needle was the likeliest of the alphabet.

    length     tokens of needle, text and question
    accuracy   share of `samples` answered right; `chance` by guessing
    by_depth   the same for needles in each quarter of the text before the question, from its start
    """

    length: int
    samples: int
    chance: float
    accuracy: float
    by_depth: list[float]


@dataclass(frozen=True)
class Questions:
    """tokens [n, length] int64 that end with marker and key; answer [n] place in the alphabet; depth [n] in [0, 1)."""

    tokens: Tensor
    answer: Tensor
    depth: Tensor


def attention_reach(run: Run) -> int:
    """Tokens before the question that attention and convolutions of all layers together can bring to it."""
    model = run.model
    own = {"c": model.segment, "g": model.window, "w": model.window}
    return sum(own.get(letter, 0) + max(model.conv - 1, 0) for letter in model.letters)


def make_questions(text: Tensor, needles: Needles, *, length: int, samples: int, reach: int, seed: int) -> Questions:
    """Texts cut out of `text` [tokens] (read round and round) with one needle, none within `reach` of the question.

    Every value is the answer equally often, so that one who always says the same is right by chance. The same seed
    gives the same questions. Raises ValueError where no place is left for a needle.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + length)
    width = mention_bytes(needles)
    room = length - (width - 1) - max(reach, width)
    if room < width:
        raise ValueError(
            f"evaluate.needle_lengths: {length} tokens leave no place for a needle beyond the {reach} tokens "
            f"that attention reaches; ask for longer texts, or shorten model.segment or model.window"
        )
    starts = torch.randint(len(text), (samples, 1), generator=generator)
    tokens = text[(starts + torch.arange(length)) % len(text)]
    depth = torch.rand(samples, generator=generator)
    answer = torch.randperm(samples, generator=generator) % len(needles.alphabet)
    for row, value in enumerate(alphabet(needles)[answer]):
        mention = _mention(needles, draw_keys(needles, 1, generator)[0], value)
        place = int(depth[row] * (room - width + 1))
        tokens[row, place : place + width] = mention
        tokens[row, 1 - width :] = mention[:-1]
    return Questions(tokens, answer, depth)


@torch.inference_mode()
def score_questions(model: nn.Module, asked: Questions, needles: Needles, *, batch: int = 64) -> NeedleScore:
    """Ask `model` (tokens, states, return_states) -> (logits, states), `batch` streams at once, of constant state."""
    letters, right = alphabet(needles), []
    for tokens, answer in zip(asked.tokens.split(batch), asked.answer.split(batch), strict=True):
        states = None
        for part in tokens.split(CUT, dim=1):
            logits, states = model(part, states=states, return_states=True)
        right.append(logits[:, -1, letters].argmax(-1) == answer)
    hits = torch.cat(right).double()
    quarter = (asked.depth * DEPTHS).long()
    return NeedleScore(
        length=asked.tokens.shape[1],
        samples=len(hits),
        chance=1.0 / len(letters),
        accuracy=float(hits.mean()),
        by_depth=[float(hits[quarter == part].mean()) for part in range(DEPTHS)],
    )


def score_lengths(
    model: nn.Module, run: Run, text: Tensor, factors: Sequence[int], *, samples: int, zero_reads: bool = False
) -> dict[int, NeedleScore]:
    """Scores over so many times data.sequence_length tokens; `zero_reads` takes all that memories say out."""
    needles = run.data.needles
    if needles is None:
        raise ValueError("data.needles = null: nothing was planted, so there is nothing to ask for; set data.needles")
    scores = {}
    set_zero_reads(model, zero_reads)
    for factor in factors:
        asked = make_questions(
            text,
            needles,
            length=factor * run.data.sequence_length,
            samples=samples if factor <= FULL_SAMPLES_UP_TO else max(samples // 4, 1),
            reach=attention_reach(run),
            seed=run.training.seed + 1,
        )
        scores[factor] = score_questions(model, asked, needles)
    set_zero_reads(model, False)
    return scores


def set_zero_reads(model: nn.Module, zero: bool) -> None:
    """Replace the reads of all memories by zeros, or stop doing so."""
    for module in model.modules():
        if hasattr(module, "zero_memory_reads"):
            setattr(module, "zero_memory_reads", zero)  # noqa: B010
