"""States: if these failed, a stream could not be stopped, saved and gone on with, or a batch not be rearranged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.memory_cases import make_case
from helpers.numerics import assert_close
from torch.utils import _pytree as pytree

from miras_megatron.memory import MemoryInputs, MemoryState, make_rule
from miras_megatron.memory import scan_memory as scan_chunked
from miras_megatron.memory.oracle import scan_memory
from miras_megatron.memory.state import join_rows, replace_state

RULES = {
    "titans": make_rule("titans"),
    "memora": make_rule("memora"),
    "deltanet": make_rule("deltanet"),
    "yaad_window": make_rule("yaad", window=3),
    "ftrl": make_rule("yaad", retention="elastic_net", elastic_form="ftrl", keep=False),
}


def _state_inside_a_chunk(name: str) -> MemoryState:
    case = make_case(RULES[name], length=7, chunk_size=4, batch=3)
    return scan_memory(case.rule, case.params, case.inputs, case.state, 4)[1]


def _assert_equal(got: MemoryState, want: MemoryState) -> None:
    assert got.tensors().keys() == want.tensors().keys()
    for name, x in want.tensors().items():
        assert got.tensors()[name].dtype == x.dtype
        assert torch.equal(got.tensors()[name], x), name


@pytest.mark.parametrize("name", RULES)
def test_a_saved_state_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    """A session saved inside a chunk must go on as if it had never stopped."""
    state = _state_inside_a_chunk(name)
    state.save(tmp_path / "state.pt")
    _assert_equal(MemoryState.load(tmp_path / "state.pt"), state.detach())
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    """Otherwise a checkpoint of something else would fail deep inside a scan."""
    torch.save({"format": 99, "tensors": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt"):
        MemoryState.load(tmp_path / "other.pt")
    torch.save(torch.zeros(2), tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match="tensor.pt"):
        MemoryState.load(tmp_path / "tensor.pt")


def test_an_empty_or_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    """What a full disk or a killed copy leaves behind; torch's own errors name no file."""
    path = tmp_path / "state.pt"
    path.touch()
    with pytest.raises(ValueError, match=r"state\.pt: no memory state: the file is empty"):
        MemoryState.load(path)
    _state_inside_a_chunk("titans").save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"state\.pt: no memory state: the file can't be read"):
        MemoryState.load(path)


@pytest.mark.parametrize("text", ["hello", "# notes\n\nof a run\n", "{}", "0" * 200, "cposix\nsystem\n"])
def test_a_text_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    """Somebody's notes under the state's name gave a KeyError of a letter."""
    (tmp_path / "state.pt").write_text(text)
    with pytest.raises(ValueError, match=r"state\.pt: no memory state: the file can't be read"):
        MemoryState.load(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "its tensors are no mapping from names to tensors"),
        ([], "its tensors are no mapping"),
        ({"weights.0": None}, "its tensors are no mapping"),
        ({"phase": ...}, "phase is missing"),
        ({"weights.0": ...}, "weights.0 is missing; 'weights.1' is no part"),
        ({"weights.0": ..., "weights.1": ...}, "weights.0 is missing"),
        ({"weights.x": torch.zeros(3, 1, 1, 1)}, "weights.2 is missing; 'weights.x' is no part of a state"),
        ({"optimizer": torch.zeros(1)}, "'optimizer' is no part of a state"),
        ({0: torch.zeros(1)}, "0 is no part of a state"),
        ({"phase": torch.zeros(3)}, r"phase is torch.float32 \(3,\), must be int64 \[B\]"),
        ({"phase": torch.zeros((), dtype=torch.int64)}, r"phase is torch.int64 \(\)"),
        (
            {"phase": torch.zeros(2, dtype=torch.int64)},
            r"weights.0 is torch.float64 \(3, 2, 16, 4\), must be .* rows of",
        ),
        ({"momentum.1": torch.zeros(3, 2)}, r"momentum.1 is torch.float32 \(3, 2\), must be floating point \[B, N"),
    ],
)
def test_a_well_formed_file_without_a_state_is_refused_by_name(change: Any, said: str, tmp_path: Path) -> None:
    """Somebody's own tensors, or a state put together wrongly: named here, not found inside a scan."""
    flat: Any = _state_inside_a_chunk("titans").detach().tensors()
    flat = {n: x for n, x in (flat | change).items() if x is not ...} if isinstance(change, dict) else change
    torch.save({"format": 1, "tensors": flat}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=rf"state\.pt: no memory state: .*{said}"):
        MemoryState.load(tmp_path / "state.pt")


@pytest.mark.parametrize("name", RULES)
def test_a_state_is_a_pytree(name: str) -> None:
    """Pipelines, checkpointing and export flatten states with torch's pytree."""
    state = _state_inside_a_chunk(name)
    leaves, spec = pytree.tree_flatten(state)
    _assert_equal(pytree.tree_unflatten(leaves, spec), state)
    assert sum(isinstance(x, torch.Tensor) for x in leaves) == len(state.tensors())


@pytest.mark.parametrize("name", RULES)
def test_rows_may_be_taken_apart_and_joined(name: str) -> None:
    """Batches are regrouped by phase and document; a mixed-up row would leak one text into another."""
    state = _state_inside_a_chunk(name)
    rows = [state.rows(torch.tensor([b])) for b in range(3)]
    _assert_equal(join_rows(rows), state)
    _assert_equal(join_rows([rows[2], rows[0]]), state.rows(torch.tensor([2, 0])))


@pytest.mark.parametrize("name", RULES)
def test_flat_tensors_rebuild_the_state(name: str) -> None:
    """Exchange between ranks sends the flat form."""
    state = _state_inside_a_chunk(name)
    _assert_equal(MemoryState.from_tensors(state.tensors()), state)


def test_detaching_cuts_the_graph_and_nothing_else() -> None:
    """Streaming on a detached state must not keep the whole past in memory."""
    state = _state_inside_a_chunk("titans")
    assert state.weights[0].requires_grad
    cut = state.detach()
    assert not any(x.requires_grad for x in cut.tensors().values())
    _assert_equal(cut, state)


def test_mapping_reaches_every_tensor_and_only_tensors() -> None:
    """A rule without a window has no `seen`; moving its state to a device must not trip over that."""
    state = _state_inside_a_chunk("titans").detach()
    doubled = state.map(lambda x: x * 2)
    assert doubled.seen is None
    for name, x in state.tensors().items():
        assert_close(name, doubled.tensors()[name].double(), 2.0 * x.double(), rtol=0)


@pytest.mark.parametrize(
    ("other", "width", "wrong"),
    [("yaad", 4, "momentum"), ("titans_linear", 4, "weights"), ("titans", 6, "weights")],
)
def test_a_state_of_another_rule_is_refused(other: str, width: int, wrong: str) -> None:
    """Yaad's state in a Titans memory would scan without its momentum and never say so."""
    rule, foreign = make_rule("titans"), make_rule(other)
    state = foreign.init_state(foreign.init_params(2, width), 1)
    gate = torch.full((1, 3, 2), 0.1)
    inputs = MemoryInputs(*torch.randn(3, 1, 3, 2, 4), momentum=gate, lr=gate)
    with pytest.raises(ValueError, match=f"state: its {wrong} are .*init_state"):
        scan_chunked(rule, rule.init_params(2, 4), inputs, state)


def test_a_state_whose_matrices_differ_is_refused() -> None:
    """Put together from two files: a kernel would read past the end of the shorter one."""
    rule = RULES["titans"]
    case = make_case(rule, 4, 2, batch=2)
    fewer = replace_state(case.state, anchor=tuple(x[:1] for x in case.state.anchor))
    with pytest.raises(ValueError, match="state: holds 1 rows of 2 heads, the inputs 2 of 2"):
        scan_chunked(rule, case.params, case.inputs, fewer, 2)
    single = replace_state(case.state, anchor=tuple(x.float() for x in case.state.anchor))
    with pytest.raises(ValueError, match=r"are torch.float32 and torch.float64; they must be of one dtype"):
        scan_chunked(rule, case.params, case.inputs, single, 2)
