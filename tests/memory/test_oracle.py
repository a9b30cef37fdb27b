"""The oracle against numbers worked out by hand and against the papers' identities.

If these failed, every fast scan would be compared with a wrong definition.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.memory_cases import Case, make_case, outcome
from helpers.memory_rules import ALL_RULES
from helpers.numerics import assert_close
from torch import Tensor

from miras_megatron.memory import RULES, MemoryInputs, MemoryState, Rule, make_rule
from miras_megatron.memory.oracle import scan_memory
from miras_megatron.memory.oracle_parts import error_signal, lq_link, newton_schulz, token_gradient
from miras_megatron.memory.oracle_tokens import features

RATED = [name for name, rule in ALL_RULES.items() if rule.write_rate == "input"]


def _column(*values: float) -> Tensor:
    """One row, one head of width 1: [1, T, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None, None]


def _gate(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


def _scalar_scan(
    rule: Rule, start: float, chunk_size: int, q: Tensor, k: Tensor, v: Tensor, **gates: Any
) -> list[float]:
    params = {"weight_0": torch.tensor([[[start]]], dtype=torch.float64)}
    reads, _ = scan_memory(rule, params, MemoryInputs(q, k, v, **gates), rule.init_state(params, 1), chunk_size)
    return reads.flatten().tolist()


def _read(case: Case, rule: Rule | None = None, **options: Any) -> Tensor:
    """The case's reads, under another rule or with another chunk size where told."""
    rule = rule or case.rule
    chunk_size = options.pop("chunk_size", case.chunk_size)
    inputs = replace(case.inputs, **options)
    return scan_memory(rule, case.params, inputs, case.state, chunk_size)[0].detach()


def _end(case: Case, rule: Rule | None = None) -> MemoryState:
    rule = rule or case.rule
    return scan_memory(rule, case.params, case.inputs, case.state, case.chunk_size)[1].detach()


# -- by hand ---------------------------------------------------------------------------------------------


def test_titans_worked_out_by_hand() -> None:
    """Three tokens of a 1x1 memory, W_0 = 1, S_0 = 0, a = m = 1/2, r = 1/10, chunks of two.

    u_1 = (1*1-0)*1 = 1        S_1 = -0.1                W_1 = 0.5 - 0.1 = 0.4
    u_2 = (1*2-1)*2 = 2        S_2 = -0.05 - 0.2 = -0.25 W_2 = 0.2 - 0.25 = -0.05     still at W_0
    u_3 = (-0.05-1)*1 = -1.05  S_3 = -0.125+0.105 = -0.02  W_3 = -0.025-0.02 = -0.045   at W_2
    """
    half = torch.full((3,), 0.5, dtype=torch.float64)[None, :, None]
    reads = _scalar_scan(
        make_rule("titans_linear"), 1.0, 2, _column(1, 2, 1), _column(1, 2, 1), _column(0, 1, 1),
        log_keep=half.log(), momentum=half, lr=_gate(0.1, 0.1, 0.1),
    )  # fmt: skip
    assert reads == pytest.approx([0.4, -0.1, -0.045])


def test_a_windowed_write_worked_out_by_hand() -> None:
    """Omega, c = 2: both gradients at the chunk's start W_0 = 1, weights oldest first.

    u_1 = (1-0)*1 = 1, u_2 = (2-1)*2 = 2; the first token has no past
    W_1 = 1 - 0.1 (0.7 * 1) = 0.93      W_2 = 0.93 - 0.1 (0.3 * 1 + 0.6 * 2) = 0.78
    chunk 2 at W_2: u_2 = (1.56-1)*2 = 1.12, u_3 = (0.78-1)*1 = -0.22
    W_3 = 0.78 - 0.1 (0.5 * 1.12 + 0.2 * -0.22) = 0.7284
    """
    rule = make_rule("titans_linear", momentum=False, window=2)
    window = torch.tensor([[0.9, 0.7], [0.3, 0.6], [0.5, 0.2]], dtype=torch.float64)[None, :, None, :]
    reads = _scalar_scan(
        rule, 1.0, 2, _column(1, 1, 1), _column(1, 2, 1), _column(0, 1, 1), lr=_gate(0.1, 0.1, 0.1), window=window
    )
    assert reads == pytest.approx([0.93, 0.78, 0.7284])


def test_elastic_net_worked_out_by_hand() -> None:
    """c1 = 2, c2 = 1, r = 1: lam = z = 1/2, gam = 1/4; W_0 = 3, k = 1, v = 1.

    local: u = 2, W_1 = soft(1.5 - 1) = 0.25; C = 1: u = -0.75, W_2 = soft(0.125 + 0.375) = 0.25
    FTRL: A_1 = 3 - 2 = 1, W_1 = soft_1/2(1) = 0.5; u = -0.5, A_2 = 1.5, W_2 = 1
    """
    ones = _column(1, 1)
    local = make_rule("titans_linear", momentum=False, keep=False, retention="elastic_net", c1=2.0, c2=1.0)
    ftrl = replace(local, elastic_form="ftrl")
    assert _scalar_scan(local, 3.0, 1, ones, ones, ones, lr=_gate(1, 1)) == pytest.approx([0.25, 0.25])
    assert _scalar_scan(ftrl, 3.0, 1, ones, ones, ones, lr=_gate(1, 1)) == pytest.approx([0.5, 1.0])


def test_moneta_worked_out_by_hand() -> None:
    """q = 4, printed: W = A / ||A||_4^2 = 1/A for one entry; W_0 = A_0 = 2, l2, r = 1, k = v = 1, keep 1.

    anchor W = 0.5: u = -0.5 both times, A_1 = 2.5, A_2 = 3; frozen norm: reads A_t / 4; running: 1 / A_t
    next chunk: W = 1/3, u = -2/3, A_3 = 11/3; frozen 11/27, running 3/11
    """
    ones = _column(1, 1, 1)
    chunk = make_rule("moneta", depth=1, layer_norm=False, residual=False, objective="l2")
    token = replace(chunk, link_read="token")
    assert _scalar_scan(chunk, 2.0, 2, ones, ones, ones, lr=_gate(1, 1, 1)) == pytest.approx([2.5 / 4, 3 / 4, 11 / 27])
    assert _scalar_scan(token, 2.0, 2, ones, ones, ones, lr=_gate(1, 1, 1)) == pytest.approx([1 / 2.5, 1 / 3, 3 / 11])


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_an_unwritten_memory_reads_its_network(depth: int) -> None:
    """f(z) = z + LN(W_out gelu(... W_in z)), exact GELU, eps 1e-5, affine LN per head."""
    case = make_case(make_rule("titans", depth=depth), 3, 2, fresh=True)
    h, z = case.inputs.q[:, 0], case.inputs.q[:, 0]
    for i in range(depth):
        h = torch.nn.functional.gelu(h) if i else h
        h = (case.params[f"weight_{i}"] @ h[..., None])[..., 0]
    h = torch.nn.functional.layer_norm(h, (4,), eps=1e-5) * case.params["norm_weight"] + case.params["norm_bias"]
    still = {"lr": torch.zeros_like(case.inputs.q[..., 0]), "log_keep": None}
    assert_close("read", _read(case, **still)[:, 0], z + h, 1e-12)


def test_polynomial_features_in_their_order() -> None:
    """Checkpoints of polynomial memories hang on the order of the monomials and on which coefficient each takes."""
    coefficients = torch.tensor([[2.0, 3.0, 5.0]])
    got = features(make_rule("omeganet", degree=2), {"coefficients": coefficients}, torch.tensor([[[7.0, 11.0]]]))
    assert got.flatten().tolist() == [2.0, 3 * 7.0, 3 * 11.0, 5 * 49.0, 5 * 77.0, 5 * 121.0]


# -- objectives ------------------------------------------------------------------------------------------

LOSSES = {
    "dot": lambda f, v, d: -(f * v).sum(),
    "l2": lambda f, v, d: (f - v).square().sum() / 2,
    "huber_coordinate": lambda f, v, d: torch.nn.functional.huber_loss(f, v, reduction="sum", delta=float(d)),
    "huber_norm": lambda f, v, d: torch.nn.functional.huber_loss(
        (f - v).norm(), torch.zeros((), dtype=f.dtype), reduction="sum", delta=float(d)
    ),
    "value_shift": lambda f, v, d: (f - v).square().sum() / 2 + d * (f - v).norm() + d * d / 2,
}


@pytest.mark.parametrize("objective", LOSSES)
@pytest.mark.parametrize("delta", [0.5, 3.0])
def test_error_signals_are_the_gradient_of_their_loss(objective: str, delta: float) -> None:
    """The table of biases gives losses; the inner loop uses their slopes."""
    torch.manual_seed(0)
    f, v = torch.randn(4, dtype=torch.float64, requires_grad=True), torch.randn(4, dtype=torch.float64)
    (want,) = torch.autograd.grad(LOSSES[objective](f, v, torch.tensor(delta)), f)
    got = error_signal(make_rule("titans", objective=objective), f - v, v, torch.full_like(v, delta))
    assert_close(objective, got, want, 1e-12)


def test_lp_is_the_smoothed_slope_as_tabled() -> None:
    """l_p: tanh(nu e) (e^2 + 1e-6)^((p-1)/2); far from 0 that is sgn(e) |e|^(p-1)."""
    e = torch.tensor([-3.0, -1.5, 2.0], dtype=torch.float64)
    got = error_signal(make_rule("moneta"), e, e, None)
    assert_close("l3", got, e.sign() * e.square(), 1e-5)
    near = torch.tensor([0.01], dtype=torch.float64)
    want = torch.tanh(10 * near) * (near * near + 1e-6)
    assert_close("l3 near 0", error_signal(make_rule("moneta"), near, near, None), want, 1e-12)


@pytest.mark.parametrize("objective", ["huber_coordinate", "huber_norm", "huber_mixed", "value_shift", "lp"])
def test_limits_of_the_objectives_are_l2(objective: str) -> None:
    """A huge threshold, no value shift, or p = 2 leave l2."""
    case = make_case(make_rule("titans", objective=objective, **({"p": 2.0} if objective == "lp" else {})), 9, 4)
    limit = (
        None
        if objective == "lp"
        else torch.full_like(case.inputs.q[..., 0], 0.0 if objective == "value_shift" else 1e9)
    )
    want = _read(case, make_rule("titans"), delta=None)
    assert_close(objective, _read(case, delta=limit), want, 1e-12)


@pytest.mark.parametrize("objective", ["huber_coordinate", "huber_norm", "huber_mixed"])
def test_a_threshold_of_zero_writes_nothing(objective: str) -> None:
    """Yaad's gate can close a token out entirely."""
    case = make_case(make_rule("yaad", objective=objective, keep=False), 9, 4)
    end = scan_memory(
        case.rule, case.params, replace(case.inputs, delta=torch.zeros_like(case.inputs.q[..., 0])), case.state, 4
    )[1]
    assert_close("weights", end.weights[0], case.state.weights[0], 0)


def test_yaad_branches_per_channel_on_the_common_norm() -> None:
    """Miras 5: delta is compared with the norm of the error, a vector of thresholds channel by channel."""
    e = torch.tensor([0.3, -0.4], dtype=torch.float64)
    got = error_signal(make_rule("yaad"), e, e, torch.tensor([0.6, 0.4], dtype=torch.float64))
    assert got.tolist() == pytest.approx([0.3, -0.4 * float(torch.tanh(torch.tensor(4.0)))])


# -- learners --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RATED)
def test_rate_zero_reads_the_first_memory(name: str) -> None:
    """With nothing written and all kept, the memory stays what it was."""
    case = make_case(ALL_RULES[name], 7, 3, fresh=True)
    zero = torch.zeros_like(case.inputs.q[..., 0])
    closed = {gate: zero for gate in ("lr", "lr_prev") if getattr(case.inputs, gate) is not None} | {"log_keep": None}
    if case.rule.fixed_keep:
        case.params["log_keep"] = torch.zeros_like(case.params["log_keep"])
    inputs = replace(case.inputs, **closed)
    reads, end = scan_memory(case.rule, case.params, inputs, case.state, 3)
    for i, weight in enumerate(end.weights):
        assert_close(f"weight {i}", weight, case.state.weights[i], 1e-12)
    again, _ = scan_memory(case.rule, case.params, inputs.tokens(6, 7), case.state, 3)
    assert_close("reads", reads[:, 6:], again, 1e-12)


def _delta_rule(case: Case, gated: bool) -> Tensor:
    """Reads of W(aI - r k k^T) + r v k^T, the gradient at W; gated: aW(I - r k k^T) + r v k^T, the gradient at aW."""
    weight, reads = case.state.weights[0].detach(), []
    a = torch.ones_like(case.inputs.q[..., 0]) if case.inputs.log_keep is None else case.inputs.log_keep.exp()
    for t in range(case.inputs.q.shape[1]):
        q, k, v = (x[:, t].detach()[..., None] for x in (case.inputs.q, case.inputs.k, case.inputs.v))
        keep, rate = a[:, t, :, None, None].detach(), case.inputs.lr[:, t, :, None, None].detach()
        eye = torch.eye(k.shape[-2], dtype=k.dtype)
        carry = keep * (eye - rate * k @ k.mT) if gated else keep * eye - rate * k @ k.mT
        weight = weight @ carry + rate * v @ k.mT
        reads.append((weight @ q)[..., 0])
    return torch.stack(reads, 1)


def test_gated_deltanet_is_its_formula() -> None:
    """aW(I - b k k^T) + b v k^T."""
    case = make_case(RULES["gated_deltanet"], 9, 4)
    assert_close("reads", _read(case), _delta_rule(case, gated=True), 1e-12)


@pytest.mark.parametrize("name", ["titans_linear", "deltanet"])
def test_chunks_of_one_are_the_online_delta_rule(name: str) -> None:
    """W(aI - r k k^T) + r v k^T: the anchored rule at C = 1 without momentum, and the exact rule."""
    case = make_case(make_rule(name, momentum=False, keep=True), 9, 1)
    assert_close("reads", _read(case), _delta_rule(case, gated=False), 1e-12)


def test_without_decay_and_momentum_titans_is_the_delta_net() -> None:
    """a = 1, m = 0, C = 1 (delta net, TTT)."""
    case = make_case(RULES["titans_linear"], 9, 1)
    still = {"log_keep": None, "momentum": torch.zeros_like(case.inputs.q[..., 0])}
    want = scan_memory(
        RULES["deltanet"],
        {},
        replace(case.inputs, log_keep=None, momentum=None),
        replace(case.state, momentum=(), anchor=()),
        1,
    )[0]
    assert_close("reads", _read(case, **still), want, 1e-12)


def test_one_chunk_is_decayed_linear_attention_on_fixed_errors() -> None:
    """C = T: every error is that of W_0."""
    case = make_case(make_rule("titans_linear", momentum=False), 9, 9)
    x, start = case.inputs, case.state.weights[0]
    errors = x.v - (start[:, None] @ x.k[..., None])[..., 0]
    attention = make_rule("linear_attention", keep=True, write_rate="input")
    want = scan_memory(attention, {}, replace(x, v=errors, momentum=None), replace(case.state, anchor=()), 9)[0]
    assert_close("reads", _read(case), want, 1e-12)


def test_linear_attention_and_retnet_sum_outer_products() -> None:
    """W_t = sum_j a^(t-j) v_j k_j^T, read by q."""
    for name in ("linear_attention", "retnet"):
        case = make_case(RULES[name], 6, 4, fresh=True)
        log_keep = case.params.get("log_keep", torch.zeros(2, dtype=torch.float64))
        start = case.state.weights[0]
        x, reads = case.inputs, []
        for t in range(6):
            weight = start * (log_keep * (t + 1)).exp()[:, None, None]
            for j in range(t + 1):
                weight = weight + (log_keep * (t - j)).exp()[:, None, None] * x.v[:, j, :, :, None] * x.k[:, j, :, None]
            reads.append((weight @ x.q[:, t, ..., None])[..., 0])
        assert_close(name, _read(case), torch.stack(reads, 1), 1e-12)


def test_swla_writes_the_previous_pair_again() -> None:
    """W_t = a W + b1 v_{t-1} k_{t-1}^T + b2 v_t k_t^T; nothing before the document."""
    case = make_case(RULES["swla"], 6, 4, fresh=True)
    x, weight, reads = case.inputs, case.state.weights[0], []
    for t in range(6):
        weight = x.log_keep[:, t].exp()[..., None, None] * weight
        for j, rate in ((t - 1, x.lr_prev), (t, x.lr)):
            if j >= 0:
                weight = weight + rate[:, t, :, None, None] * x.v[:, j, :, :, None] * x.k[:, j, :, None]
        reads.append((weight @ x.q[:, t, ..., None])[..., 0])
    assert_close("reads", _read(case), torch.stack(reads, 1), 1e-12)


def test_a_window_that_weighs_only_its_newest_token_is_none() -> None:
    """Omega with c = 1 is the plain rule."""
    case = make_case(make_rule("titans", window=3), 9, 4)
    newest = torch.zeros_like(case.inputs.window)
    newest[..., -1] = 1
    plain = replace(case, state=replace(case.state, tail={}, seen=None), inputs=replace(case.inputs, window=None))
    assert_close("reads", _read(case, window=newest), _read(plain, make_rule("titans")), 1e-12)


def test_momentum_of_zero_is_no_momentum() -> None:
    """S_0 is forgotten at once and W_t = a W - r u."""
    case = make_case(RULES["titans"], 9, 4)
    zero = torch.zeros_like(case.inputs.q[..., 0])
    plain = replace(case, state=replace(case.state, momentum=()), inputs=replace(case.inputs, momentum=None))
    assert_close("reads", _read(case, momentum=zero), _read(plain, make_rule("titans", momentum=False)), 1e-12)


def test_newton_schulz_is_nearly_orthogonal_and_scale_free() -> None:
    """NS5 pulls every singular value to about 1, whatever the scale; nothing in, nothing out."""
    torch.manual_seed(0)
    for shape in ((4, 6), (6, 4), (5, 5)):
        m = torch.randn(2, 3, *shape, dtype=torch.float64)
        values = torch.linalg.svdvals(newton_schulz(m))
        assert 0.3 < float(values.min()) and float(values.max()) < 1.3
        assert_close("scale", newton_schulz(1e3 * m), newton_schulz(m), 1e-9)
    assert not newton_schulz(torch.zeros(2, 2)).any()


def test_newton_schulz_per_chunk_writes_at_its_last_token_only() -> None:
    """W only decays inside a chunk and takes r NS5(S) at its end."""
    case = make_case(make_rule("titans_linear", newton_schulz="chunk", keep=False), 5, 4)
    ends = [
        scan_memory(case.rule, case.params, case.inputs.tokens(0, t), case.state, 4)[1].detach() for t in range(1, 6)
    ]
    start = case.state.weights[0].detach()
    for end in ends[:3]:
        assert_close("inside", end.weights[0], start, 0)
    jump = case.inputs.lr[:, 3, :, None, None].detach() * newton_schulz(ends[3].momentum[0])
    assert_close("last", ends[3].weights[0], start + jump, 1e-12)
    assert_close("next chunk", ends[4].weights[0], start + jump, 1e-12)


def test_the_clamp_scales_each_gradient_to_its_norm() -> None:
    """A surprise is cut in length, not in direction; a limit nothing reaches changes nothing."""
    case = make_case(RULES["titans"], 9, 4)
    arguments = (case.params, case.state.weights, case.inputs.k[:, 0], case.inputs.v[:, 0], None)
    free = token_gradient(make_rule("titans"), *arguments)
    cut = token_gradient(make_rule("titans", max_gradient_norm=0.1), *arguments)
    for u, clamped in zip(free, cut, strict=True):
        norm = torch.linalg.matrix_norm(u, keepdim=True)
        assert_close("clamped", clamped, u * (0.1 / norm).clamp_max(1), 1e-12)
    assert_close("free", _read(case, make_rule("titans", max_gradient_norm=1e6)), _read(case), 0)


# -- retentions ------------------------------------------------------------------------------------------


def test_memora_stays_on_its_simplex() -> None:
    """All weights positive, each row sums to c, at every token of the exact form and each first token of the linear."""
    for form, chunk_size in (("exact", 4), ("linear", 1)):
        case = make_case(make_rule("memora", kl_form=form), 9, chunk_size, fresh=True)
        end = _end(case)
        for i, weight in enumerate(end.weights):
            dense = weight.exp() if form == "exact" else weight
            assert bool((dense > 0).all())
            want = case.params[f"scale_{i}"][:, None].expand_as(dense[..., 0])
            assert_close(f"row sums {i}", dense.sum(-1), want, 1e-12)


def test_memora_in_log_space_is_the_step_form() -> None:
    """At C = 1 the published lag-token form takes the full step at every token, as the log-space form does."""
    case = make_case(make_rule("memora"), 9, 1, fresh=True)
    exact = make_rule("memora", kl_form="exact")
    want = scan_memory(exact, case.params, case.inputs, exact.init_state(case.params, 2), 1)[0]
    assert_close("reads", _read(case), want, 1e-12)


def test_memora_is_linear_in_unnormalised_logs() -> None:
    """softmax is shift invariant: accumulate a L - r u over a chunk, normalise once."""
    case = make_case(make_rule("memora", kl_form="exact"), 4, 4)
    x, logs = case.inputs, list(case.state.weights)
    anchor = tuple(w.exp() for w in case.state.weights)
    for t in range(4):
        u = token_gradient(case.rule, case.params, anchor, x.k[:, t], x.v[:, t] - x.k[:, t], None)
        keep, rate = x.log_keep[:, t].exp()[..., None, None], x.lr[:, t, :, None, None]
        logs = [keep * w - rate * g for w, g in zip(logs, u, strict=True)]
    for i, (got, want) in enumerate(zip(_end(case).weights, logs, strict=True)):
        scale = case.params[f"scale_{i}"][:, None, None]
        assert_close(f"weight {i}", got.exp(), scale * torch.softmax(want, -1), 1e-12)


def test_moneta_links_have_their_degrees() -> None:
    """Doubling A: printed multiplies W by 2^(3-q), the exact link by 2, the unit norm by 1."""
    torch.manual_seed(0)
    a = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for link, factor in (("printed", 0.5), ("exact_link", 2.0), ("unit_norm", 1.0)):
        rule = make_rule("moneta", link=link)
        assert_close(link, lq_link(rule, 2 * a, 2 * a), factor * lq_link(rule, a, a), 1e-12)


def test_the_exact_link_is_the_minimiser() -> None:
    """W = argmin ||W||_q^2 / 2 - <W, A>: the slope of the first term at W is A (the dual correction)."""
    torch.manual_seed(0)
    a = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    w = lq_link(make_rule("moneta", link="exact_link", q=1.5), a, a).requires_grad_()
    (slope,) = torch.autograd.grad(torch.linalg.vector_norm(w, 1.5).square() / 2, w)
    assert_close("slope", slope, a, 1e-12)


@pytest.mark.parametrize("link", ["printed", "exact_link"])
def test_lq_of_two_is_gradient_descent(link: str) -> None:
    """q = p = 2: the link is the identity."""
    case = make_case(make_rule("moneta", q=2.0, link=link), 9, 4)
    assert_close("reads", _read(case), _read(case, make_rule("moneta", retention="decay")), 1e-12)


def test_elastic_net_without_sparsity_is_decay() -> None:
    """c1 = inf: W_t = lam (W - r u) with lam = c2 / (c2 + r); the FTRL form is plain gradient descent."""
    case = make_case(make_rule("ttt_mlp", retention="elastic_net", c1=float("inf"), c2=0.7), 9, 4)
    shrink = 0.7 / (0.7 + case.inputs.lr.detach())
    want = _read(case, make_rule("dla", objective="l2"), log_keep=shrink.log(), lr=shrink * case.inputs.lr)
    assert_close("local", _read(case), want, 1e-12)
    ftrl = replace(case.rule, elastic_form="ftrl")
    start = replace(case, state=replace(case.state, momentum=case.state.weights))
    assert_close("ftrl", _read(start, ftrl), _read(case, make_rule("ttt_mlp")), 1e-12)


def test_the_smooth_threshold_is_near_the_hard_one() -> None:
    """|x| arctan(x / gam) / (pi / 2) approaches x from below as x grows, and is x at gam = 0."""
    case = make_case(ALL_RULES["elastic_local_smooth"], 5, 4)
    zero = torch.zeros_like(case.inputs.q[..., 0])
    end = scan_memory(case.rule, case.params, replace(case.inputs, lr=zero), case.state, 4)[1]
    assert_close("gam = 0", end.weights[0], case.state.weights[0], 1e-12)


def test_sigmoid_weights_move_in_logits() -> None:
    """f' = logit: W = sigmoid(logit(W) - r u), always inside (0, 1)."""
    case = make_case(ALL_RULES["sigmoid"], 1, 1)
    x, start = case.inputs, case.state.weights
    anchor = tuple(w.sigmoid() for w in start)
    u = token_gradient(case.rule, case.params, anchor, x.k[:, 0], x.v[:, 0] - x.k[:, 0], None)
    for i, weight in enumerate(_end(case).weights):
        assert_close(f"logits {i}", weight, torch.logit(anchor[i]) - x.lr[:, 0, :, None, None] * u[i], 1e-9)


# -- gates, documents, causality ---------------------------------------------------------------------------


def test_channel_gates_act_on_their_side() -> None:
    """Rows are the value side; columns the key side (GLA, KDA): keep_i W_ij against W_ij keep_j."""
    for side in ("rows", "columns"):
        case = make_case(make_rule("titans_linear", momentum=False, gate_side=side), 1, 1, channel=("log_keep",))
        x, start = case.inputs, case.state.weights[0]
        u = token_gradient(case.rule, case.params, (start,), x.k[:, 0], x.v[:, 0], None)[0]
        keep = x.log_keep[:, 0].exp()
        kept = keep[..., :, None] * start if side == "rows" else start * keep[..., None, :]
        assert_close(side, _end(case).weights[0], kept - x.lr[:, 0, :, None, None] * u, 1e-12)


def test_deep_channel_gates_act_where_the_head_width_is() -> None:
    """The input matrix takes them on its columns, the output matrix on its rows."""
    case = make_case(make_rule("dla"), 1, 1, channel=("log_keep", "lr"), per_layer=True)
    x, start = case.inputs, case.state.weights
    u = token_gradient(case.rule, case.params, start, x.k[:, 0], x.v[:, 0], None)
    for i, at in ((0, (..., None, slice(None))), (1, (..., slice(None), None))):
        want = x.log_keep[i][:, 0].exp()[at] * start[i] - x.lr[i][:, 0][at] * u[i]
        assert_close(f"matrix {i}", _end(case).weights[i], want, 1e-12)


def test_a_channel_gate_on_a_hidden_matrix_is_refused() -> None:
    """Its sides are hidden units, which no gate of the model has values for."""
    case = make_case(make_rule("titans", depth=3), 2, 2)
    with pytest.raises(ValueError, match="log_keep of matrix 1"):
        _read(case, log_keep=-torch.ones_like(case.inputs.q))
    with pytest.raises(ValueError, match="lr"):
        _read(case, lr=None)


@pytest.mark.parametrize("name", RULES)
def test_documents_in_a_row_know_nothing_of_each_other(name: str) -> None:
    """Packing texts into one row must not leak one into the next; the first goes on from the given state."""
    case = make_case(RULES[name], 11, 4)
    cuts = [0, 3, 4, 11]
    packed, end = scan_memory(case.rule, case.params, case.inputs, case.state, 4, cu_seqlens=torch.tensor(cuts))
    parts, state = [], case.state
    for start, stop in zip(cuts, cuts[1:], strict=False):
        state = case.state if start == 0 else case.rule.init_state(case.params, 2)
        reads, state = scan_memory(case.rule, case.params, case.inputs.tokens(start, stop), state, 4)
        parts.append(reads)
    assert_close("reads", packed, torch.cat(parts, 1), 0)
    for i, weight in enumerate(state.weights):
        assert_close(f"weight {i}", end.weights[i], weight, 0)
    with pytest.raises(ValueError, match="cu_seqlens"):
        scan_memory(case.rule, case.params, case.inputs, case.state, 4, cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize("name", ALL_RULES)
def test_the_past_never_depends_on_the_future(name: str) -> None:
    """A language model that peeks trains to a loss it can't reach when it writes."""
    case = make_case(ALL_RULES[name], 9, 4, batch=1, heads=1)
    changed = replace(case.inputs, k=case.inputs.k.clone(), v=case.inputs.v.clone(), q=case.inputs.q.clone())
    for x in (changed.q, changed.k, changed.v):
        x.data[:, 6] += 1
    other = scan_memory(case.rule, case.params, changed, case.state, 4)[0]
    assert_close("before", other[:, :6], _read(case)[:, :6], 0)
    assert not torch.equal(other[:, 6:], _read(case)[:, 6:])


@pytest.mark.parametrize("name", RULES)
def test_reads_are_the_same_without_a_graph(name: str) -> None:
    """Evaluation runs under no_grad, where inner gradients must still be taken."""
    case = make_case(RULES[name], 9, 4)
    with torch.no_grad():
        reads, end = scan_memory(case.rule, case.params, case.inputs, case.state, 4)
    assert_close("reads", reads, _read(case), 0)
    assert not any(x.requires_grad for x in end.tensors().values())


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    """bf16 arithmetic would lose writes; only the reads go back to bf16."""
    case = make_case(RULES["titans"], 9, 4, fresh=True, dtype=torch.float32)
    half = case.inputs.map(lambda x: x.detach().bfloat16())
    reads, end = scan_memory(case.rule, case.params, half, case.state, 4)
    want, _ = scan_memory(case.rule, case.params, half.map(lambda x: x.float()), case.state, 4)
    assert reads.dtype == torch.bfloat16 and end.weights[0].dtype == torch.float32
    assert torch.equal(reads, want.bfloat16())


@pytest.mark.parametrize("name", ["titans", "gated_deltanet"])
def test_the_outer_gradient_passes_through_the_inner_loop(name: str) -> None:
    """The model learns what to store: finite differences of a loss, second-order terms included, over three chunks."""
    case = make_case(replace(RULES[name], expansion=1), 5, 2, batch=1, heads=1, head_dim=3)
    leaves = list(case.leaves().values())
    assert torch.autograd.gradcheck(lambda *_: _reads_and_weights(case), leaves, atol=1e-6, rtol=1e-4)
    grads = outcome(scan_memory, case)
    for leaf in ("q", "k", "v", *case.rule.gates, "params.weight_0", "state.weights.0"):
        assert leaf.startswith("params") or float(grads[f"grad.{leaf}"].abs().max()) > 0


def _reads_and_weights(case: Case) -> tuple[Tensor, ...]:
    reads, end = scan_memory(case.rule, case.params, case.inputs, case.state, case.chunk_size)
    return reads, *end.weights


@pytest.mark.parametrize("name", ["titans", "memora", "gated_deltanet"])
def test_inputs_of_another_dtype_are_computed_in_the_states(name: str) -> None:
    """float64 inputs with init_params' default float32 would be an error, or arithmetic in a dtype nobody named."""
    case = make_case(RULES[name], 9, 4, fresh=True, dtype=torch.float32)
    double = case.inputs.map(lambda x: x.detach().double())
    reads, end = scan_memory(case.rule, case.params, double, case.state, 4)
    want, _ = scan_memory(case.rule, case.params, case.inputs, case.state, 4)
    assert reads.dtype == torch.float64 and end.weights[0].dtype == torch.float32
    assert torch.equal(reads.float(), want)
