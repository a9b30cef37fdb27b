"""Summaries of slices: composing them equals scanning from the start."""

from dataclasses import replace

import pytest
import torch
from helpers.memory_cases import assert_same, make_case, outcome

from miras_megatron.layers.documents import Documents, last_rows
from miras_megatron.memory import make_rule, scan_memory
from miras_megatron.memory.affine import SummaryForm, arriving_state, compose_slices, summarise_slice
from miras_megatron.memory.state import MemoryState

TOKENS, CHUNK = 23, 4
BOUNDS = {"ragged": [0, 5, 8, 9, 15, TOKENS], "on chunks": [0, 4, 16, TOKENS], "single tokens": [0, 1, 2, 3, TOKENS]}
DOCUMENTS = {
    "one": None,
    "packed": [[0, 8, TOKENS], [0, 7, 9, 16, TOKENS], [0, TOKENS]],
}
RULES = {
    "linear_attention": ("linear_attention", {}, ()),
    "retnet": ("retnet", {}, ()),
    "deltanet": ("deltanet", {}, ()),
    "gated_deltanet": ("gated_deltanet", {}, ()),
    "swla": ("swla", {}, ()),
    "swla, channel": ("swla", {}, ("log_keep", "lr", "lr_prev")),
    "titans_linear": ("titans_linear", {}, ()),
    "no momentum": ("titans_linear", {"momentum": False}, ()),
    "ttt_linear, no norm": ("ttt_linear", {"layer_norm": False}, ()),
    "window": ("titans_linear", {"window": 3}, ()),
    "features": ("titans_linear", {"degree": 2, "window": 2}, ()),
    "residual": ("titans_linear", {"residual": True}, ()),
    "columns": ("titans_linear", {"gate_side": "columns"}, ("log_keep", "momentum")),
    "dot, rows": ("titans_linear", {"objective": "dot"}, ("log_keep", "momentum")),
    "dot, columns": ("titans_linear", {"objective": "dot", "gate_side": "columns"}, ("momentum",)),
}


def scan_by_slices(rule, params, inputs, state, chunk_size, *, cu_seqlens, bounds, dtype=torch.float64):
    """Every slice from the summaries of those to its left; the last state is the one after the last slice."""
    batch, tokens = inputs.q.shape[:2]
    documents = Documents.of(cu_seqlens, batch, tokens)
    starts = documents.starts if documents else ((0,),) * batch
    start, reads, summaries = rule.init_state(params, batch), [], []
    inside = any((b - max(s for s in row if s <= b)) % chunk_size for b in bounds[1:-1] for row in starts)
    form = SummaryForm.of(rule, inputs, inside)
    for left, right in zip(bounds[:-1], bounds[1:], strict=True):
        part = inputs.tokens(left, right)
        before = [left - max(s for s in row if s <= left) for row in starts]
        arriving = arriving_state(rule, params, start, before, _context(rule, inputs, left, starts), chunk_size)
        here = [[0, *(s - left for s in row if left < s < right)] for row in starts]
        state = _from_left(form, summaries, start, arriving, before) if summaries else state
        borders = [torch.tensor([*row, right - left]) for row in here]
        read, state = scan_memory(rule, params, part, state, chunk_size, borders)
        reads.append(read)
        last = [row[-1] for row in here]
        summaries.append(summarise_slice(form, rule, params, part, start, arriving, before, last, chunk_size, 2))
    return torch.cat(reads, 1), state


def _context(rule, inputs, left, starts):
    if rule.window == 1:
        return None
    cut = None
    if left > 0:
        cut = Documents(tuple(tuple(s for s in row if s < left) for row in starts), left)
    nothing = inputs.k.new_zeros(inputs.k.shape[0], rule.window - 1, *inputs.k.shape[2:])
    return tuple(last_rows(nothing, x[:, :left], cut) for x in (inputs.k, inputs.v))


def _from_left(form, summaries, start, arriving, before):
    came = compose_slices(form, summaries)
    goes_on = torch.tensor([tokens > 0 for tokens in before])[:, None, None, None]

    def matrix(name, known):
        return tuple(torch.where(goes_on, came[name], x) for x in known)

    anchor = matrix("anchor" if "anchor" in came else "weights", start.anchor)
    return replace(
        arriving, weights=matrix("weights", start.weights), momentum=matrix("momentum", start.momentum), anchor=anchor
    )


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("name", RULES)
def test_slices_compose_to_the_scan(name: str, bounds: str, documents: str) -> None:
    """The scan carry starts every rank but the first from such a state: reads, end state and every gradient."""
    rule_name, choices, channel = RULES[name]
    case = make_case(make_rule(rule_name, **choices), TOKENS, CHUNK, batch=3, fresh=True, channel=channel)
    cut = DOCUMENTS[documents]
    case = replace(case, cu_seqlens=None if cut is None else [torch.tensor(row) for row in cut])
    assert_same(outcome(scan_by_slices, case, bounds=BOUNDS[bounds]), outcome(scan_memory, case))


def test_chunks_longer_than_a_tile_are_summarised_too() -> None:
    """Then a chunk is walked in tiles whose anchor stays."""
    case = make_case(make_rule("titans_linear"), 200, 96, batch=1, heads=1, fresh=True)
    assert_same(outcome(scan_by_slices, case, bounds=[0, 70, 96, 180, 200]), outcome(scan_memory, case))


def test_inputs_of_bf16_make_summaries_of_float32() -> None:
    """A transition in bf16 would forget after a few slices; states never are."""
    rule = make_rule("titans_linear")
    case = make_case(rule, 12, CHUNK, fresh=True, dtype=torch.float32)
    inputs, nothing = case.inputs.map(lambda x: x.detach().bfloat16()), [0, 0]
    start: MemoryState = rule.init_state(case.params, 2)
    form = SummaryForm.of(rule, inputs, False)
    assert form.blocks == ("weights", "momentum")
    summary = summarise_slice(form, rule, case.params, inputs, start, start, [4, 0], nothing, CHUNK)
    assert summary.dtype == torch.float32
    assert summary.shape == (2, 2, 2, form.rows, 4)
    assert not summary[1, :, :, form.out :].any(), "a row that begins a document does not hang on what was before"


@pytest.mark.parametrize("name", ["titans", "yaad", "moneta", "memora"])
def test_other_rules_are_refused(name: str) -> None:
    """Their slices have no summary: composing one would be another memory."""
    case = make_case(make_rule(name), 4, CHUNK)
    with pytest.raises(ValueError, match=f"{name}.*not affine"):
        SummaryForm.of(case.rule, case.inputs, False)


def test_channel_gates_on_rows_are_refused_where_each_row_had_its_own_transition() -> None:
    """One transition for all rows is what makes a summary small."""
    case = make_case(make_rule("titans_linear"), 4, CHUNK, channel=("log_keep",))
    with pytest.raises(ValueError, match="channel gates on the rows"):
        SummaryForm.of(case.rule, case.inputs, False)
