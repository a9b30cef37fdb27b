"""If these fail, training on a CPU computes another memory than the rule's: the compiled walk against the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.memory_cases import Case, assert_same, make_case, outcome
from helpers.memory_rules import OPTIONS
from helpers.numerics import assert_close
from miras_kernels.cpu_build import NoKernel, load_cpu_scan
from miras_kernels.cpu_scan import MOST_THREADS, CpuScan

from miras_megatron.memory import RULES, make_rule, oracle, scan_memory
from miras_megatron.memory.fused_lanes import KERNELS, kernel_for
from miras_megatron.memory.fused_plan import Plan, Tile

FREE = ("titans", "titans_linear", "dla", "retnet", "linear_attention", "ttt_linear", "ttt_mlp")
WALKED = {
    **{name: RULES[name] for name in FREE},
    **{f"titans depth {depth}": OPTIONS[f"depth_{depth}"] for depth in (1, 3, 4)},
    "titans without norm": make_rule("titans", layer_norm=False, expansion=2),
    "titans without residual": make_rule("titans", residual=False, expansion=2),
    "titans dot": make_rule("titans", objective="dot", expansion=2),
    **{name: OPTIONS[name] for name in ("degree_2", "fixed_keep", "no_keep", "no_momentum", "lp_2", "write_rate_one")},
}


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernel in use, and the calls that reached it."""
    try:
        compiled = load_cpu_scan()
    except NoKernel as reason:
        pytest.fail(f"a machine that runs the tests has a C compiler, yet {reason}")
    calls: list[str] = []

    class Counted(CpuScan):
        def forward(self, *args: Any) -> None:
            calls.append("forward")
            super().forward(*args)

        def backward(self, *args: Any) -> None:
            calls.append("backward")
            super().backward(*args)

    counted = Counted(compiled._libraries, compiled._products)
    monkeypatch.setitem(KERNELS, "cpu", counted)
    yield calls


def _assert_equals_oracle(case: Case, calls: list[str]) -> None:
    assert_same(outcome(scan_memory, case), outcome(oracle.scan_memory, case))
    assert {"forward", "backward"} <= set(calls), "the kernel wasn't asked"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("name", WALKED)
def test_every_walked_rule_equals_the_oracle(name: str, length: int, kernel: list[str]) -> None:
    """Rows, heads and a state from before, over chunk borders and ragged ends, in float64."""
    _assert_equals_oracle(make_case(WALKED[name], length, 4, per_layer=length % 2 == 0), kernel)


@pytest.mark.parametrize("chunk_size", [1, 16, 70, 200])
@pytest.mark.parametrize("name", ["titans", "titans depth 3", "retnet"])
def test_chunks_and_tiles_equal_the_oracle(name: str, chunk_size: int, kernel: list[str]) -> None:
    """A chunk longer than a tile keeps its first weights; short tiles at its end are a run of their own."""
    length = 5 if chunk_size == 1 else 75
    _assert_equals_oracle(make_case(WALKED[name], length, chunk_size, batch=1, heads=2, head_dim=3), kernel)


@pytest.mark.parametrize("phases", [(3, 3), (3, 0)])
@pytest.mark.parametrize("name", ["titans", "titans depth 1", "dla"])
def test_rows_may_go_on_inside_a_chunk(name: str, phases: tuple[int, int], kernel: list[str]) -> None:
    """The gradient of an anchor from before must leave by the state, whether or not the chunk ends here."""
    for length in (1, 9):
        _assert_equals_oracle(make_case(WALKED[name], length, 4, phases=phases), kernel)


@pytest.mark.parametrize(
    "gates",
    [
        {"log_keep": -50.0},
        {"log_keep": -math.inf},
        {"momentum": 0.0},
        {"momentum": 1.0, "lr": 1e-3},
        {"log_keep": -math.inf, "momentum": 0.0, "lr": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["titans", "titans_linear"])
def test_extreme_gates_equal_the_oracle(name: str, gates: dict[str, float], kernel: list[str]) -> None:
    """Exact zeros and cumulative logs below -200 must give zeros, never NaN."""
    case = make_case(WALKED[name], 9, 5)
    with torch.no_grad():
        for gate, value in gates.items():
            getattr(case.inputs, gate)[:, 1:8].fill_(value)
    _assert_equals_oracle(case, kernel)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "above", [{"log_keep": 0.0}, {"log_keep": 1e-6}, {"log_keep": 0.3}, {"momentum": 1.2}], ids=str
)
def test_gates_at_and_above_one_are_the_oracles(
    above: dict[str, float], dtype: torch.dtype, kernel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside its range a gate was cut off by the kernel alone: a machine with a compiler trained another memory."""
    case = make_case(WALKED["titans"], 9, 5, dtype=dtype)
    with torch.no_grad():
        for gate, value in above.items():
            getattr(case.inputs, gate)[:, 1:8].fill_(value)
    want, got = outcome(oracle.scan_memory, case), outcome(scan_memory, case)
    assert "forward" in kernel and "backward" in kernel
    monkeypatch.delitem(KERNELS, "cpu")
    plain = outcome(scan_memory, case)
    bounds = (1e-9, 1e-4) if dtype == torch.float64 else (1e-4, 1e-2)
    assert_same(got, want, *bounds)
    assert_same(plain, want, *bounds)


def test_packed_documents_equal_the_oracle(kernel: list[str]) -> None:
    """Borders that differ between rows: lanes of one call stand in different documents' places."""
    case = make_case(WALKED["titans"], 14, 4, phases=[3, 0])
    _assert_equals_oracle(replace(case, cu_seqlens=[torch.tensor([0, 2, 3, 14]), torch.tensor([0, 5, 14])]), kernel)


@pytest.mark.parametrize("every", [1, 2])
def test_states_kept_between_spans_change_nothing(every: int, kernel: list[str]) -> None:
    """Spans are walked again from the states between them, ragged ends included."""
    case = make_case(WALKED["titans"], 21, 2, phases=[1, 1])
    assert_same(outcome(scan_memory, case, checkpoint_every=every), outcome(scan_memory, case), rtol=1e-12)


@pytest.mark.parametrize("name", ["titans", "titans dot", "titans_linear", "titans depth 3"])
@pytest.mark.parametrize(("heads", "width", "length"), [(3, 64, 150), (1, 37, 130)])
def test_float32_is_close_to_float64(name: str, heads: int, width: int, length: int, kernel: list[str]) -> None:
    """Float32 has its own exponential and error function, taken in vectors with ragged ends: training runs on it."""
    case = make_case(WALKED[name], length, 64, heads=heads, head_dim=width, batch=1, fresh=True, dtype=torch.float32)
    double = replace(
        case,
        params={n: p.detach().double().requires_grad_() for n, p in case.params.items()},
        inputs=case.inputs.map(lambda x: x.detach().double().requires_grad_()),
        state=case.rule.init_state({n: p.detach().double() for n, p in case.params.items()}, 1),
    )
    got, kernels = outcome(scan_memory, case), len(kernel)
    KERNELS.pop("cpu")
    want, plain = outcome(scan_memory, double), outcome(scan_memory, case)
    assert kernels and len(kernel) == kernels
    for name, x in want.items():
        error, usual = ((y[name].double() - x).abs().max().item() for y in (got, plain))
        assert error <= 4.0 * usual + 1e-6 * x.abs().max().item(), (
            f"{name}: {error:.1e}, torch's operations {usual:.1e}"
        )


def test_activations_are_right_far_from_zero(kernel: list[str]) -> None:
    """Memories that have learned reach pre-activations of ten and more, where exp and erf run into their limits."""
    case = make_case(WALKED["titans"], 8, 4, head_dim=8, batch=1, fresh=True, dtype=torch.float32)
    with torch.no_grad():
        case.params["weight_0"].mul_(30.0)
    got = outcome(scan_memory, case)
    KERNELS.pop("cpu")
    for name, want in outcome(scan_memory, case).items():
        assert_close(name, got[name], want, 1e-4, 1e-3)


def test_what_is_no_number_is_seen() -> None:
    """A NaN in one token must reach its loss, not vanish in a clamp; other rows and earlier tokens stay as they are."""
    case = make_case(WALKED["titans"], 9, 4, batch=2, dtype=torch.float32)
    with torch.no_grad():
        want, _ = scan_memory(case.rule, case.params, case.inputs, case.state, 4)
        case.inputs.k[0, 4, 0, 0] = math.nan
        got, _ = scan_memory(case.rule, case.params, case.inputs, case.state, 4)
    assert got[0, 4:, 0].isnan().all()
    assert torch.equal(got[0, :4], want[0, :4]) and torch.equal(got[1], want[1])


def test_views_are_read_where_they_lie(kernel: list[str]) -> None:
    """Layers hand over keys and values as views of one tensor; a wrong stride would mix heads."""
    case = make_case(WALKED["titans"], 9, 4)
    wide = torch.stack([case.inputs.k, case.inputs.v], -2).detach().requires_grad_()
    key, value = wide.unbind(-2)
    turned = case.inputs.q.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    viewed = replace(case.inputs, q=turned, k=key, v=value)
    got, _ = scan_memory(case.rule, case.params, viewed, case.state, 4)
    want, _ = scan_memory(case.rule, case.params, case.inputs, case.state, 4)
    assert_close("reads", got, want, 1e-12)
    weight = torch.randn_like(want)
    grads = torch.autograd.grad((want * weight).sum(), [case.inputs.k, case.inputs.v])
    assert_close("gradient", torch.autograd.grad((got * weight).sum(), wide)[0], torch.stack(grads, -2), 1e-12)


def test_one_query_for_all_tokens_is_read_as_many(kernel: list[str]) -> None:
    """An expanded tensor's rows are one row, which BLAS refuses; its gradient is the sum over tokens."""
    case = make_case(WALKED["titans"], 9, 4)
    single = case.inputs.q[:, :1].detach().requires_grad_()
    asked = (single.expand_as(case.inputs.q), single.repeat(1, 9, 1, 1))
    reads = [scan_memory(case.rule, case.params, replace(case.inputs, q=q), case.state, 4)[0] for q in asked]
    assert_close("reads", reads[0], reads[1], 1e-12)
    one, many = (torch.autograd.grad(y.square().sum(), single)[0] for y in reads)
    assert_close("gradient", one, many, 1e-12)


def test_heads_may_differ_in_which_gates_they_share(kernel: list[str]) -> None:
    """Room is taken once for all lanes: the second's gates are no twins, and would be written past its end."""
    case = make_case(WALKED["ttt_mlp"], 9, 4)
    rate = case.inputs.lr.detach() if isinstance(case.inputs.lr, torch.Tensor) else case.inputs.lr[0].detach()
    rate = rate.requires_grad_()
    shared = rate[:, :, :1].expand_as(rate)
    pairs = ((rate, shared), (rate.clone(), shared.contiguous()))
    reads = [scan_memory(case.rule, case.params, replace(case.inputs, lr=lr), case.state, 4)[0] for lr in pairs]
    assert_close("reads", reads[0], reads[1], 1e-12)
    one, many = (torch.autograd.grad(y.square().sum(), rate)[0] for y in reads)
    assert_close("gradient", one, many, 1e-12)
    KERNELS.pop("cpu")
    plain = scan_memory(case.rule, case.params, replace(case.inputs, lr=pairs[0]), case.state, 4)[0]
    assert_close("by torch's operations", plain, reads[1], 1e-12)


@pytest.mark.parametrize("length", [1, 9])
def test_anchors_may_lie_transposed(length: int, kernel: list[str]) -> None:
    """A state put together by somebody else: its strides must not decide about its values or their gradients."""
    case = make_case(WALKED["titans"], length, 4, phases=(2, 2))

    def turned(matrices: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(x.detach().mT.contiguous().mT.requires_grad_() for x in matrices)

    found = []
    for lay in (tuple, turned):
        state = replace(case.state, weights=lay(case.state.weights), anchor=lay(case.state.anchor))
        reads, after = scan_memory(case.rule, case.params, case.inputs, state, 4)
        loss = reads.square().sum() + sum(x.square().sum() for x in (*after.weights, *after.anchor))
        found.append([reads, *torch.autograd.grad(loss, [*state.weights, *state.anchor], retain_graph=True)])
    for i, (one, other) in enumerate(zip(*found, strict=True)):
        assert_close(f"value {i}", other, one, 1e-12)


def test_a_second_derivative_is_refused(kernel: list[str]) -> None:
    """A penalty on gradients would otherwise be dropped without a word."""
    case = make_case(WALKED["titans"], 5, 4)
    reads, _ = scan_memory(case.rule, case.params, case.inputs, case.state, 4)
    (grad,) = torch.autograd.grad(reads.square().sum(), case.inputs.k, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


@pytest.mark.parametrize("elsewhere", ["q", "k", "lr", "params['norm_weight']", "state: weights.0", "state: anchor.1"])
def test_tensors_of_two_devices_are_refused_by_name(elsewhere: str, kernel: list[str]) -> None:
    """The kernel takes addresses: one of another device's memory ended the process with a segmentation fault."""
    case = make_case(WALKED["titans"], 5, 4)
    params, inputs, state = dict(case.params), case.inputs, case.state

    def away(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to("meta")

    if elsewhere.startswith("params"):
        params["norm_weight"] = away(params["norm_weight"])
    elif elsewhere.startswith("state"):
        flat = state.tensors()
        state = type(state).from_tensors(flat | {elsewhere[7:]: away(flat[elsewhere[7:]])})
    else:
        assert isinstance(gate := getattr(inputs, elsewhere), torch.Tensor)
        inputs = replace(inputs, **{elsewhere: away(gate)})
    with pytest.raises(ValueError, match="is on (meta|cpu): q is on (cpu|meta)") as refused:
        scan_memory(case.rule, params, inputs, state, 4)
    assert (f"{elsewhere} is on meta" if elsewhere != "q" else "q is on meta") in str(refused.value) and not kernel


def test_arguments_of_two_devices_or_dtypes_never_reach_the_kernel(kernel: list[str]) -> None:
    """The last guard before addresses are taken, whatever a caller forgot to look at."""
    rule = WALKED["titans"]
    plan = Plan(rule, ((Tile(0, 1, True, False),),), rule.depth, False, True, (True, True), False, True, False)
    same = [torch.zeros(1), torch.zeros(2)]
    assert kernel_for(plan, same) is KERNELS["cpu"]
    for other in (torch.zeros(1, device="meta"), torch.zeros(1, dtype=torch.float64)):
        assert kernel_for(plan, [*same, other]) is None


def test_what_it_does_not_walk_goes_to_torch(kernel: list[str]) -> None:
    """Other objectives and many threads: the same results by torch's operations, and no call with half a rule."""
    case = make_case(RULES["yaad"], 9, 4)
    assert_same(outcome(scan_memory, case), outcome(oracle.scan_memory, case))
    assert not kernel
    like, threads = torch.zeros(1), torch.get_num_threads()
    try:
        torch.set_num_threads(MOST_THREADS + 1)
        assert not KERNELS["cpu"].takes("l2", 2, like)
    finally:
        torch.set_num_threads(threads)
    assert KERNELS["cpu"].takes("l2", 2, like)
    assert not KERNELS["cpu"].takes("l2", 2, like.half()) and not KERNELS["cpu"].takes("huber_norm", 2, like)
