"""The fast scan against the oracle, in float64: reads, the state after, and the gradient of every input.

If these failed, every model trained with `scan_memory` would compute something else than its rule says. A sample
that meets every rule and option runs by default; the matrices marked `full` run in `make test-full`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.memory_cases import GATES, Case, Scan, assert_same, make_case, outcome
from helpers.memory_rules import ALL_RULES, OPTIONS, random_rules
from helpers.numerics import assert_close
from torch import Tensor

from miras_megatron.memory import RULES, MemoryInputs, MemoryState, Rule, make_rule, read_memory, scan_memory
from miras_megatron.memory import oracle as definition
from miras_megatron.memory.state import join_rows

CHUNKS = (1, 2, 16, 64)
PACKED = {
    "around_a_chunk": ([1, 15, 16, 17, 51],) * 2,
    "inside_chunks": ([3, 18, 1, 17, 11],) * 2,
    "other_cuts_a_row": ([1, 15, 16, 17, 51], [3, 18, 1, 17, 61]),
    "one_row_whole": ([100], [3, 18, 1, 17, 61]),
    "a_document_a_token": ([1] * 100, [50, 50]),
}
LONG = 1334
MIXTURES = random_rules(60, seed=7)
FEW = {
    "titans": make_rule("titans", expansion=2),
    "titans_linear": RULES["titans_linear"],
    "gated_deltanet": RULES["gated_deltanet"],
    "moneta": make_rule("moneta", expansion=2),
    "memora": make_rule("memora", expansion=2),
    "yaad_window": OPTIONS["window_yaad"],
    "atlas": make_rule("atlas", expansion=2),
    "ftrl": OPTIONS["elastic_ftrl_hard"],
}
"""one of each kind: hand-written, triangular, frozen norm, lag token, tail, orthogonal, walked"""


def _assert_equals_oracle(case: Case) -> None:
    assert_same(outcome(scan_memory, case), outcome(definition.scan_memory, case))


# -- equal to the definition -----------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [(), GATES], ids=["head", "channel"])
@pytest.mark.parametrize("name", RULES)
def test_named_rules_equal_the_oracle(name: str, channel: Sequence[str]) -> None:
    """The rules that configurations name, with both kinds of gates, across chunk borders."""
    _assert_equals_oracle(make_case(RULES[name], 11, 4, channel=channel, per_layer=bool(channel)))


@pytest.mark.parametrize("channel", [(), ("log_keep", "delta")], ids=["head", "mixed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_the_oracle(name: str, channel: Sequence[str]) -> None:
    """Each choice of `Rule` away from its default, by the hand-written backward (head gates) and by autograd."""
    _assert_equals_oracle(make_case(OPTIONS[name], 9, 4, batch=1, channel=channel, per_layer=bool(channel)))


@pytest.mark.parametrize(
    "name", [*list(MIXTURES)[:12], *(pytest.param(n, marks=pytest.mark.full) for n in list(MIXTURES)[12:])]
)
def test_random_mixtures_equal_the_oracle(name: str) -> None:
    """Nobody thinks of every pair of options; chance does."""
    seed = list(MIXTURES).index(name)
    channel = [gate for i, gate in enumerate(GATES) if (seed >> i) & 1]
    _assert_equals_oracle(make_case(MIXTURES[name], 9, 4, channel=channel, per_layer=seed % 2 == 0, seed=seed))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", FEW)
def test_short_sequences_equal_the_oracle(name: str, length: int) -> None:
    """Sequences shorter than, equal to and just longer than a chunk, with the window's tail partly real."""
    _assert_equals_oracle(make_case(FEW[name], length, 4, head_dim=3))


@pytest.mark.parametrize("chunk_size", [1, 70, 200])
@pytest.mark.parametrize("name", ["titans", "gated_deltanet", "moneta", "memora", "yaad_window"])
def test_chunks_and_tiles_equal_the_oracle(name: str, chunk_size: int) -> None:
    """A chunk longer than a tile is walked in tiles with the anchor frozen; a chunk of one anchors every token."""
    _assert_equals_oracle(make_case(FEW[name], 5 if chunk_size == 1 else 75, chunk_size, batch=1, heads=1, head_dim=2))


def _lengths() -> Iterator[tuple[int, int]]:
    for chunk in CHUNKS:
        for length in sorted({1, 2, chunk - 1, chunk, chunk + 1, 63, 100} - {0}):
            yield chunk, length


def _sampled_lengths() -> Iterator[tuple[str, int, int]]:
    """Two pairs a rule, going round, so that the rules together meet every pair."""
    pairs = list(_lengths())
    for i, name in enumerate(RULES):
        yield from ((name, *pairs[(2 * i + j) % len(pairs)]) for j in range(2))


def _length_case(rule: Rule, chunk_size: int, length: int) -> Case:
    return make_case(rule, length, chunk_size, batch=1, channel=GATES if (length + chunk_size) % 2 else (), seed=length)


@pytest.mark.parametrize(("name", "chunk_size", "length"), list(_sampled_lengths()))
def test_a_sample_of_lengths_equals_the_oracle(name: str, chunk_size: int, length: int) -> None:
    """A length that is no multiple of the chunk is what documents have."""
    _assert_equals_oracle(_length_case(RULES[name], chunk_size, length))


@pytest.mark.full
@pytest.mark.parametrize(("chunk_size", "length"), list(_lengths()))
@pytest.mark.parametrize("name", ALL_RULES)
def test_all_rules_and_lengths_equal_the_oracle(name: str, chunk_size: int, length: int) -> None:
    """The whole matrix of rules, options, chunk sizes and ragged lengths."""
    _assert_equals_oracle(_length_case(ALL_RULES[name], chunk_size, length))


@pytest.mark.full
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", RULES)
def test_a_long_ragged_sequence_equals_the_oracle(name: str, chunk_size: int) -> None:
    """1,334 tokens: no multiple of any chunk but 1 and 2, and long enough for errors to add up."""
    _assert_equals_oracle(make_case(RULES[name], LONG, chunk_size, batch=1, heads=1))


@pytest.mark.parametrize("name", RULES)
def test_reading_without_writing_equals_the_running_read(name: str) -> None:
    """Memory as context reads the running weights before it writes; inside a chunk that is the last token's read."""
    case = make_case(RULES[name], 7, 4)
    reads, state = definition.scan_memory(case.rule, case.params, case.inputs, case.state, 4)
    assert_close("read", read_memory(case.rule, case.params, state, case.inputs.q[:, -1:]), reads[:, -1:], 1e-9)


# -- extreme gates ---------------------------------------------------------------------------------------

EXTREMES: dict[str, dict[str, float]] = {
    "keep_exp_-50": {"log_keep": -50.0},
    "keep_zero": {"log_keep": float("-inf")},
    "keep_all": {"log_keep": 0.0},
    "momentum_zero": {"momentum": 0.0},
    "momentum_one": {"momentum": 1.0, "lr": 1e-3},
    "rate_zero": {"lr": 0.0},
    "everything_closed": {"log_keep": float("-inf"), "momentum": 0.0, "lr": 0.0},
}
GATED = FEW | {"kl_exact": OPTIONS["kl_exact"], "swla": RULES["swla"]}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", GATED)
def test_extreme_gates_equal_the_oracle(name: str, extreme: str) -> None:
    """Cumulative log gates below -200, exact zeros and ones: no NaN, in no gradient, where quotients would overflow."""
    rule = GATED[name]
    values = {gate: value for gate, value in EXTREMES[extreme].items() if gate in rule.gates}
    if not values:
        return
    case = make_case(rule, 9, 5, channel=("log_keep",) if rule.depth == 1 else ())
    for gate, value in values.items():
        with torch.no_grad():
            getattr(case.inputs, gate)[:, 1:8].fill_(value)
    _assert_equals_oracle(case)


# -- states handed on ------------------------------------------------------------------------------------


def _in_pieces(cuts: Sequence[int]) -> Scan:
    """The scan that stops at every cut and goes on from the state it was handed."""

    def scan(
        rule: Rule, params: dict[str, Tensor], inputs: MemoryInputs, state: MemoryState, chunk_size: int, **_: Any
    ) -> tuple[Tensor, MemoryState]:
        reads, length = [], inputs.q.shape[1]
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            part, state = scan_memory(rule, params, inputs.tokens(start, stop), state, chunk_size)
            reads.append(part)
        return torch.cat(reads, 1), state

    return scan


@pytest.mark.parametrize("name", RULES)
def test_token_by_token_equals_one_pass(name: str) -> None:
    """Generation feeds one token at a time what training read at once."""
    case = make_case(RULES[name], 9, 4, phases=[2, 2])
    assert_same(outcome(_in_pieces(range(1, 9)), case), outcome(scan_memory, case))


@pytest.mark.parametrize("name", ["titans", "memora"])
def test_a_sequence_may_be_cut_anywhere(name: str) -> None:
    """Context parallelism and streaming rest on this: going on from a handed-over state equals never having stopped.

    For every rule, and with gradients, below.
    """
    case = make_case(ALL_RULES[name], 100, 16, batch=1, heads=1, head_dim=3)
    with torch.no_grad():
        want, end = scan_memory(case.rule, case.params, case.inputs, case.state, 16)
        for cut in range(1, 100):
            got, last = _in_pieces([cut])(case.rule, case.params, case.inputs, case.state, 16)
            assert_close(f"reads cut at {cut}", got, want, 1e-9)
            for key, x in end.tensors().items():
                assert_close(f"{key} cut at {cut}", last.tensors()[key], x, 1e-9)


@pytest.mark.parametrize("cut", [15, 16, 17])
@pytest.mark.parametrize("name", FEW)
def test_gradients_pass_through_a_cut(name: str, cut: int) -> None:
    """Relayed gradients must reach the tokens before the border, the anchor's share included."""
    case = make_case(FEW[name], 35, 16, batch=1, heads=1)
    assert_same(outcome(_in_pieces([cut]), case), outcome(scan_memory, case))


@pytest.mark.full
@pytest.mark.parametrize("name", ALL_RULES)
def test_gradients_pass_through_a_cut_anywhere(name: str) -> None:
    """Every rule and option, cut after every token, and at many places at once."""
    case = make_case(ALL_RULES[name], 100, 16, batch=1, heads=1, head_dim=3)
    want = outcome(scan_memory, case)
    for cuts in (*([cut] for cut in range(1, 100)), [7, 8, 31, 33, 64]):
        assert_same(outcome(_in_pieces(cuts), case), want)


@pytest.mark.parametrize("name", RULES)
def test_rows_may_stand_at_different_phases(name: str) -> None:
    """Documents of one batch start anywhere; each row keeps its own chunk grid and its own anchor."""
    _assert_equals_oracle(make_case(RULES[name], 9, 4, batch=3, phases=[3, 0, 1]))


def test_a_detached_state_may_be_used_twice() -> None:
    """Truncated training backpropagates each piece on its own, from the same handed-over state."""
    case = make_case(RULES["titans"], 9, 4)
    _, state = scan_memory(case.rule, case.params, case.inputs, case.state, 4)
    grads = []
    for _ in range(2):
        reads, _ = scan_memory(case.rule, case.params, case.inputs, state.detach(), 4)
        grads.append(torch.autograd.grad(reads.sum(), case.inputs.k)[0])
    assert torch.equal(*grads) and bool(grads[0].any())


# -- packed documents ------------------------------------------------------------------------------------


def _apart(lengths: Sequence[Sequence[int]]) -> Scan:
    """The scan that runs every document of every row on its own."""

    def scan(
        rule: Rule, params: dict[str, Tensor], inputs: MemoryInputs, state: MemoryState, chunk_size: int, **_: Any
    ) -> tuple[Tensor, MemoryState]:
        rows, ends = [], []
        for b, row in enumerate(lengths):
            alone, reads, start = inputs.map(lambda x, b=b: x[b : b + 1]), [], 0
            for length in row:
                first = state.rows(torch.tensor([b])) if start == 0 else rule.init_state(params, 1)
                part, end = scan_memory(rule, params, alone.tokens(start, start + length), first, chunk_size)
                reads.append(part)
                start += length
            rows.append(torch.cat(reads, 1))
            ends.append(end)
        return torch.cat(rows), join_rows(ends)

    return scan


def _cuts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def _assert_packed_equals_apart(rule: Rule, lengths: Sequence[Sequence[int]]) -> None:
    case = make_case(rule, sum(lengths[0]), 16, head_dim=3, heads=1)
    cuts = [_cuts(row) for row in lengths]
    packed = replace(case, cu_seqlens=cuts[0] if lengths[0] == lengths[1] else cuts)
    assert_same(outcome(scan_memory, packed), outcome(_apart(lengths), case))


@pytest.mark.parametrize("documents", ["around_a_chunk", "inside_chunks", "other_cuts_a_row"])
@pytest.mark.parametrize("name", FEW)
def test_packed_documents_equal_separate_runs(name: str, documents: str) -> None:
    """A leak between packed texts, or a chunk grid that does not restart, is a wrong model that nobody notices."""
    _assert_packed_equals_apart(FEW[name], PACKED[documents])


@pytest.mark.full
@pytest.mark.parametrize("documents", PACKED)
@pytest.mark.parametrize("name", ALL_RULES)
def test_all_rules_keep_packed_documents_apart(name: str, documents: str) -> None:
    """The same cuts for all rows, other cuts a row, one row whole, a document a token: for every rule and option."""
    _assert_packed_equals_apart(ALL_RULES[name], PACKED[documents])


@pytest.mark.parametrize("name", FEW)
def test_packed_documents_equal_the_oracle(name: str) -> None:
    """Different cuts a row, on rows that go on from different phases."""
    case = make_case(FEW[name], 14, 4, phases=[3, 0])
    _assert_equals_oracle(replace(case, cu_seqlens=[_cuts([2, 1, 11]), _cuts([5, 9])]))


def test_an_empty_document_changes_nothing() -> None:
    """Loaders repeat a border where a document has no tokens left in a window."""
    case = make_case(RULES["titans"], 9, 4)
    got = outcome(scan_memory, replace(case, cu_seqlens=torch.tensor([0, 4, 4, 9])))
    assert_same(got, outcome(scan_memory, replace(case, cu_seqlens=torch.tensor([0, 4, 9]))), rtol=0)


# -- recomputation, precision, finite differences ------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_recomputation_does_not_change_results(name: str) -> None:
    """How many states are kept is a matter of memory only."""
    case = make_case(FEW[name], 21, 2, phases=[1, 1])
    want = outcome(scan_memory, case, checkpoint_every=1)
    for every in (2, 8):
        assert_same(outcome(scan_memory, case, checkpoint_every=every), want, rtol=1e-12)
    with torch.no_grad():
        reads, _ = scan_memory(case.rule, case.params, case.inputs, case.state, 2)
    assert_close("reads without a graph", reads, want["reads"], 1e-12)


@pytest.mark.parametrize("name", RULES)
def test_float32_is_close_to_float64(name: str) -> None:
    """Training runs in float32: 40 tokens of rounding stay below 1e-4 in reads and every gradient."""
    case = make_case(RULES[name], 40, 16, fresh=True, dtype=torch.float32)
    double = replace(
        case,
        params={n: p.detach().double().requires_grad_() for n, p in case.params.items()},
        inputs=case.inputs.map(lambda x: x.detach().double().requires_grad_()),
    )
    for one in (case, double):
        one.state = one.rule.init_state(one.params, 2)
    assert_same(outcome(scan_memory, case), outcome(scan_memory, double), rtol=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_bfloat16_inputs_are_computed_in_float32(name: str) -> None:
    """bf16 q, k, v and gates round only where reads and gradients are handed back: half a percent of their RMS."""
    case = make_case(RULES[name], 20, 8, fresh=True, dtype=torch.float32)
    half = replace(case, inputs=case.inputs.map(lambda x: x.detach().bfloat16().requires_grad_()))
    whole = replace(case, inputs=half.inputs.map(lambda x: x.detach().float().requires_grad_()))
    got, want = outcome(scan_memory, half), outcome(scan_memory, whole)
    assert got["reads"].dtype == torch.bfloat16 and got["end.weights.0"].dtype == torch.float32
    for key, x in want.items():
        error = (got[key].double() - x.double()).square().mean().sqrt()
        assert float(error) <= 5e-3 * float(x.double().square().mean().sqrt()), key


@pytest.mark.parametrize(
    "name",
    ["titans", "gated_deltanet", *(pytest.param(n, marks=pytest.mark.full) for n in ("moneta", "memora", "atlas"))],
)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """The outer gradient through three chunks, independent of any autograd: every leaf, none of them 0."""
    case = make_case(replace(RULES[name], expansion=1), 7, 3, batch=1, heads=1, head_dim=3)
    leaves = case.leaves()

    def run(*_: Tensor) -> tuple[Tensor, ...]:
        reads, end = scan_memory(case.rule, case.params, case.inputs, case.state, 3)
        return reads, *end.weights

    assert torch.autograd.gradcheck(run, list(leaves.values()), atol=1e-6, rtol=1e-4)
    grads = outcome(scan_memory, case)
    for leaf in ("q", "k", "v", *case.rule.gates, "state.weights.0"):
        assert float(grads[f"grad.{leaf}"].abs().max()) > 0, leaf


# -- what is refused ---------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_by_name() -> None:
    """A gate of the wrong shape would broadcast into another function; a missing one would be a crash far away."""
    case = make_case(make_rule("titans", depth=3), 5, 4, phases=[3, 3])
    x, ones = case.inputs, torch.ones_like(case.inputs.q[..., 0])
    wrong: dict[str, tuple[MemoryInputs, dict[str, Any]]] = {
        "lr": (replace(x, lr=None), {}),
        "momentum": (replace(x, momentum=ones[:, :, :1]), {}),
        "delta": (replace(x, delta=ones), {}),
        "log_keep of matrix 1": (replace(x, log_keep=-torch.ones_like(x.q)), {}),
        "lr: 2 tensors": (replace(x, lr=(ones, ones)), {}),
        "k ": (replace(x, k=x.k[..., :2]), {}),
        "chunk_size = 0": (x, {"chunk_size": 0}),
        "chunk_size = 1.5": (x, {"chunk_size": 1.5}),
        "chunk_size = True": (x, {"chunk_size": True}),
        "checkpoint_every = 2.0": (x, {"checkpoint_every": 2.0}),
        "chunk_size = 3": (x, {"chunk_size": 3}),
        "checkpoint_every": (x, {"checkpoint_every": 0}),
        "cu_seqlens of row 0": (x, {"cu_seqlens": torch.tensor([0, 4])}),
        "cu_seqlens of row 1": (x, {"cu_seqlens": [torch.tensor([0, 5]), torch.tensor([0, 4, 3, 5])]}),
        "cu_seqlens: 1": (x, {"cu_seqlens": [torch.tensor([0, 5])]}),
    }
    for words, (inputs, options) in wrong.items():
        with pytest.raises(ValueError) as refused:
            scan_memory(case.rule, case.params, inputs, case.state, **({"chunk_size": 4} | options))
        assert words in str(refused.value), f"{words!r} isn't named in: {refused.value}"


def test_params_of_another_rule_or_width_are_refused_by_name() -> None:
    """A norm too many would be applied, one too few left out, and a wrong width be an error inside a product."""
    case = make_case(make_rule("titans"), 5, 4)
    weight, norm = case.params["weight_1"], case.params["norm_bias"]
    without = {name: x for name, x in case.params.items() if name != "norm_weight"}
    wrong = without | {"weight_1": weight[:, :, 1:], "norm_bias": norm[:1], "coefficients": norm}
    with pytest.raises(ValueError) as refused:
        scan_memory(case.rule, wrong, case.inputs, case.state, 4)
    first, *lines = str(refused.value).splitlines()
    assert "titans" in first
    assert [line.partition(":")[0].strip() for line in lines] == [
        "params['weight_1'] (2, 4, 15)",
        "params['norm_weight']",
        "params['norm_bias'] (1, 4)",
        "params['coefficients']",
    ]


def test_a_channel_gate_on_polynomial_columns_is_refused() -> None:
    """A gate of D values has no meaning on the binom(D+p, p) columns of a polynomial memory's input matrix."""
    rule = make_rule("omeganet", degree=2)
    case = make_case(rule, 5, 4)
    with pytest.raises(ValueError, match="log_keep of matrix 0"):
        scan_memory(rule, case.params, replace(case.inputs, log_keep=-torch.ones_like(case.inputs.q)), case.state, 4)
