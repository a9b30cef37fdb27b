"""If these fail, arguments that can't be meant are computed with, or end in an error that names no argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.memory_cases import Case, make_case
from torch import Tensor

from miras_megatron.memory import RULES, make_rule, read_memory, scan_memory

TITANS = make_rule("titans", expansion=2)
WINDOWED = make_rule("yaad", window=3, expansion=2)
MATRICES, SIZES = ("weights", "momentum", "anchor"), ("heads", "head_dim")


def _case(**options: Any) -> Case:
    return make_case(TITANS, 5, 4, **options)


def _refused(run: Callable[[], object], *said: str) -> None:
    with pytest.raises(ValueError) as refused:
        run()
    for words in said:
        assert words in str(refused.value), f"{words!r} isn't in: {refused.value}"


# -- where a state stands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (torch.zeros(1, dtype=torch.int64), "state: phase is torch.int64 (1,): must be int64 (2,), one number a row"),
        (torch.zeros(2, 1, dtype=torch.int64), "state: phase is torch.int64 (2, 1)"),
        (torch.zeros((), dtype=torch.int64), "state: phase is torch.int64 ()"),
        (torch.zeros(2), "state: phase is torch.float32 (2,): must be int64"),
        (torch.tensor([1, -1]), "state: phase = [1, -1]: counts tokens, so none is below 0"),
        (torch.tensor([0, 4]), "state: stands 4 tokens inside a chunk, chunk_size = 4 is smaller"),
        ([0, 0], "state: phase = [0, 0]: must be an int64 tensor [2]"),
    ],
    ids=str,
)
def test_a_phase_that_is_none_is_refused(phase: Any, said: str) -> None:
    """A phase of -1 was scanned on another chunk grid, one too short for some of the rows only."""
    case = _case()
    _refused(lambda: scan_memory(TITANS, case.params, case.inputs, replace(case.state, phase=phase), 4), said)


def test_a_tail_that_is_none_is_refused() -> None:
    """The past tokens of a windowed rule are written again: another rule's, or more than there are, would be too."""
    case, plain = make_case(WINDOWED, 5, 4), _case()
    state, seen = case.state, torch.tensor([1, 3])
    short = {name: x[:, 1:] for name, x in state.tail.items()}
    for wrong, said in (
        (replace(state, seen=seen), "counts 3 past tokens, its tail holds 2"),
        (replace(state, seen=None), "seen = None: must be an int64 tensor [2]"),
        (replace(state, tail=short), "state: its tail is {'key': (2, 1, 2, 4)"),
        (replace(state, tail={}), "state: its tail is {}, this rule has {'key': (2, 2, 2, 4)"),
    ):
        _refused(lambda wrong=wrong: scan_memory(WINDOWED, case.params, case.inputs, wrong, 4), said)  # type: ignore[misc]
    foreign = replace(plain.state, tail=state.tail, seen=state.seen)
    _refused(lambda: scan_memory(TITANS, plain.params, plain.inputs, foreign, 4), "this rule has none", "no window")


@pytest.mark.parametrize(
    ("borders", "said"),
    [
        (torch.tensor([0.0, 2.5, 5.0]), "cu_seqlens of row 0 is torch.float32 (3,): must be int64 with one dimension"),
        (torch.tensor([0.0, math.nan, 5.0]), "cu_seqlens of row 0 is torch.float32"),
        (torch.tensor(5), "cu_seqlens of row 0 is torch.int64 ()"),
        (torch.tensor([[0, 5], [0, 5]]), "cu_seqlens of row 0 is torch.int64 (2, 2)"),
        (torch.tensor([False, True]), "cu_seqlens of row 0 is torch.bool"),
        ([torch.tensor([0, 5]), [0, 2.5, 5]], "cu_seqlens of row 1 = [0, 2.5, 5]: must be a tensor of whole numbers"),
        (5, "cu_seqlens = 5: must be one tensor, or a list with one a row"),
        (torch.tensor([]), "cu_seqlens of row 0 = []: must rise from 0"),
    ],
    ids=str,
)
def test_borders_that_are_none_are_refused(borders: Any, said: str) -> None:
    """A border of 2.5 cut a document in two at token 2 without a word."""
    case = _case()
    _refused(lambda: scan_memory(TITANS, case.params, case.inputs, case.state, 4, borders), said)


def test_borders_of_32_bits_and_plain_lists_are_borders() -> None:
    """Other libraries' cu_seqlens are int32."""
    case = _case()
    wanted = scan_memory(TITANS, case.params, case.inputs, case.state, 4, torch.tensor([0, 2, 5]))[0]
    for borders in (torch.tensor([0, 2, 5], dtype=torch.int32), [[0, 2, 5], [0, 2, 5]]):
        assert torch.equal(scan_memory(TITANS, case.params, case.inputs, case.state, 4, borders)[0], wanted)  # type: ignore[arg-type]


# -- what is no tensor of numbers --------------------------------------------------------------------------


def _gate() -> Tensor:
    return torch.full((2, 5, 2), 0.1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": (_gate(), None)}, "lr of matrix 1 = None: must be a tensor"),
        ({"lr": 0.01}, "lr = 0.01: must be a tensor, or a tuple with one a matrix"),
        ({"lr": (0.1, 0.1)}, "lr of matrix 0 = 0.1: must be a tensor"),
        ({"lr": (_gate(),)}, "lr: 1 tensors for a memory of 2 matrices"),
        ({"momentum": "0.9"}, "momentum = '0.9': must be a tensor"),
        ({"delta": (_gate(), _gate())}, "delta = (tensor("),
        ({"q": [[0.0]]}, "q = [[0.0]]: must be a tensor"),
        ({"k": None}, "k = None: must be a tensor"),
        ({"q": torch.zeros(2, 5, 2, 4, dtype=torch.complex64)}, "q is torch.complex64: must be of floating point"),
        ({"v": torch.zeros(2, 5, 2, 4, dtype=torch.int64)}, "v is torch.int64: must be of floating point numbers"),
        ({"k": torch.zeros(2, 5, 2, 4, dtype=torch.bool)}, "k is torch.bool: must be of floating point numbers"),
        ({"lr": torch.ones(2, 5, 2, dtype=torch.int64)}, "lr is torch.int64: must be of floating point numbers"),
    ],
    ids=str,
)
def test_what_is_no_tensor_of_numbers_is_refused(changes: dict[str, Any], said: str) -> None:
    """An AttributeError out of a loop over matrices doesn't say which argument was meant."""
    case = _case()
    _refused(lambda: scan_memory(TITANS, case.params, replace(case.inputs, **changes), case.state, 4), said)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_a_state_is_of_32_or_64_bits(dtype: torch.dtype) -> None:
    """A memory that is summed up in bf16 forgets; it was a KeyError in one scan and an answer in another."""
    case = _case()
    half = replace(case.state, **{n: tuple(x.detach().to(dtype) for x in getattr(case.state, n)) for n in MATRICES})
    for run in (
        lambda: scan_memory(TITANS, case.params, case.inputs, half, 4),
        lambda: read_memory(TITANS, case.params, half, case.inputs.q),
    ):
        _refused(run, f"state: weights.0 is {dtype}: must be ", "state: anchor.1")


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_batch_of_no_rows_reads_nothing(name: str) -> None:
    """Filters leave batches empty; a rank that fails on one takes all others with it."""
    rule = RULES[name]
    case = make_case(rule, 3, 4, batch=1)
    inputs, state = case.inputs.map(lambda x: x[:0]), rule.init_state(case.params, 0)
    reads, after = scan_memory(rule, case.params, inputs, state, 4)
    assert reads.shape == (0, 3, 2, 4) and reads.dtype == inputs.q.dtype
    assert {n: x.shape for n, x in after.tensors().items()} == {n: x.shape for n, x in state.tensors().items()}
    reads.sum().backward()
    assert case.inputs.q.grad is not None and not case.inputs.q.grad.any()


@pytest.mark.parametrize("size", [-1, 1.5, None, True, "2"], ids=str)
def test_sizes_that_are_none_are_refused(size: Any) -> None:
    """torch's own words for them name no argument, and 0 heads were a memory of nothing."""
    params = TITANS.init_params(2, 4)
    _refused(lambda: TITANS.init_state(params, size), f"batch = {size!r}: must be a whole number of at least 0")
    said = [f"{name} = {wrong!r}: must be a whole number of at least 1" for name in SIZES for wrong in (size, 0)]
    _refused(lambda: TITANS.init_params(size, size), said[0], said[2])
    _refused(lambda: TITANS.init_params(0, 0), said[1], said[3])


def test_queries_of_other_rows_heads_or_width_are_refused() -> None:
    """One row's queries over two rows' memories were broadcast: an answer out of somebody else's memory."""
    case = _case()
    q, params, state = case.inputs.q, case.params, case.state
    foreign = make_rule("titans_linear")
    _refused(lambda: read_memory(TITANS, params, state, q[:1]), "can't read", "state: holds 2 rows of 2 heads, the")
    _refused(lambda: read_memory(TITANS, params, state, q[:, :, :1]), "the inputs 2 of 1")
    _refused(lambda: read_memory(TITANS, params, state, q[..., :2]), "params['weight_0'] (2, 8, 4): must be (2, 4, 2)")
    _refused(lambda: read_memory(TITANS, params, state, q[0]), "q (5, 2, 4): must be [B, T, N, D]")
    _refused(lambda: read_memory(TITANS, params, state, q.long()), "q is torch.int64")
    _refused(lambda: read_memory(foreign, params, state, q), "this rule has no such parameter", "state: its weights")
    fresh = TITANS.init_state(params, 2)
    assert read_memory(TITANS, params, fresh, q[:, :0]).shape == (2, 0, 2, 4)
