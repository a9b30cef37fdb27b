"""What every mixer block owes: causality, cuts anywhere, documents apart, gradients everywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.layer_blocks import BLOCK_CASES, hidden_states, named_block, small_block, small_spec, state_tensors
from helpers.numerics import assert_close

from miras_megatron.layers import BLOCKS, BlockSpec, PlainLinear, build_block
from miras_megatron.memory import RULES, make_rule

MEMORY_CASES = [name for name, (letter, _) in BLOCK_CASES.items() if letter in "mcg"]
RTOL = 1e-11


@pytest.mark.parametrize("name", BLOCK_CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_no_output_sees_a_later_token(name: str, packed: bool) -> None:
    """A block that looks ahead learns to cheat: its loss in training means nothing for generation."""
    block, tokens = named_block(name), 21
    cuts = torch.tensor([0, 6, 7, tokens]) if packed else None
    x = hidden_states(1, tokens).repeat(tokens + 1, 1, 1)
    for changed in range(tokens):
        x[changed, changed] += 1.0
    with torch.no_grad():
        y, _ = block(x, cu_seqlens=cuts)
    for changed in range(tokens):
        before = (y[changed, :changed] - y[-1, :changed]).abs()
        assert changed == 0 or float(before.max()) <= 1e-12, f"token {changed} reaches back"
        assert float((y[changed, changed] - y[-1, changed]).abs().max()) > 1e-4, f"token {changed} does not act"
        ended = [c for c in (6, 7) if packed and c > changed]
        if ended:
            after = (y[changed, ended[0] :] - y[-1, ended[0] :]).abs()
            assert float(after.max()) <= 1e-12, f"token {changed} reaches into the next document"


@pytest.mark.parametrize("name", BLOCK_CASES)
@pytest.mark.parametrize("tokens", [1, 2, 5, 33, 63, 100])
def test_a_stream_may_be_cut_anywhere(name: str, tokens: int) -> None:
    """Generation, chat sessions and context parallelism go on from a state: they must equal one pass."""
    block, x = named_block(name), hidden_states(2, tokens)
    cuts = [cut for cut in (1, 2, 5, 8, 19, 32, 33, 62, 99) if cut < tokens]
    alone = cuts if tokens < 63 else cuts[-2:]
    with torch.no_grad():
        whole, end = block(x, return_state=True)
        for plan in [[cut] for cut in alone] + [cuts]:
            state, parts = None, []
            for start, stop in pairwise([0, *plan, tokens]):
                y, state = block(x[:, start:stop], state=state, return_state=True)
                parts.append(y)
            assert_close(f"outputs cut at {plan}", torch.cat(parts, 1), whole, RTOL)
            for number, (got, want) in enumerate(zip(state_tensors(state), state_tensors(end), strict=True)):
                assert_close(f"state {number} cut at {plan}", got, want, RTOL, floor=1.0)


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_token_by_token_equals_one_pass(name: str) -> None:
    """Otherwise what is generated is not what was trained."""
    block, x = named_block(name), hidden_states(2, 33)
    with torch.no_grad():
        whole, none = block(x)
        state, parts = None, []
        for token in range(x.shape[1]):
            y, state = block(x[:, token : token + 1], state=state, return_state=True)
            parts.append(y)
    assert none is None
    assert_close("outputs", torch.cat(parts, 1), whole, RTOL)


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_packed_documents_equal_separate_runs(name: str) -> None:
    """Packing is only an arrangement: a document must not know its neighbours, in outputs, gradients or states."""
    block, x = named_block(name), hidden_states(2, 45)
    cuts = [[0, 1, 16, 19, 45], [0, 17, 45]]
    weight = hidden_states(2, 45, seed=1)
    leaf = x.clone().requires_grad_()
    packed, end = block(leaf, cu_seqlens=[torch.tensor(c) for c in cuts], return_state=True)
    (packed * weight).sum().backward()
    together = [leaf.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]
    block.zero_grad()
    alone = x.clone().requires_grad_()
    for row, borders in enumerate(cuts):
        for start, stop in pairwise(borders):
            y, state = block(alone[row : row + 1, start:stop], return_state=True)
            assert_close(f"row {row} from {start}", packed[row : row + 1, start:stop], y, RTOL)
            (y * weight[row : row + 1, start:stop]).sum().backward()
        # attention's cache is as wide as the widest row: compare what a going-on stream makes of both
        more = hidden_states(1, 13, seed=2)
        wanted, _ = block(more, state=state)
        got, _ = block(more.expand(2, -1, -1), state=end)
        assert_close(f"after row {row}", got[row : row + 1], wanted, RTOL)
    separate = [alone.grad, *(p.grad for p in block.parameters() if p.grad is not None)]
    for number, (got, want) in enumerate(zip(together, separate, strict=True)):
        assert_close(f"gradient {number}", got, want, 1e-9, floor=1e-3)


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_going_on_with_documents_in_mid_stream(name: str) -> None:
    """A row that stopped inside a segment, a chunk or a window goes on there, and then starts its next document."""
    block, x = named_block(name), hidden_states(2, 40)
    with torch.no_grad():
        _, state = block(x[:, :19], cu_seqlens=[torch.tensor([0, 12, 19]), torch.tensor([0, 19])], return_state=True)
        for wanted in (True, False):
            cuts = [torch.tensor([0, 5, 21]), torch.tensor([0, 21])]
            y, _ = block(x[:, 19:], cu_seqlens=cuts, state=state, return_state=wanted)
            assert_close("going on", y[:1, :5], block(x[:1, 12:24])[0][:, 7:], RTOL)
            assert_close("the next document", y[:1, 5:], block(x[:1, 24:])[0], RTOL)
            assert_close("the other row", y[1:], block(x[1:])[0][:, 19:], RTOL)


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_gradients_reach_every_parameter_and_cross_a_cut(name: str) -> None:
    """A parameter without gradient never learns, and a cut without gradient truncates what is learned."""
    block, x = named_block(name), hidden_states(2, 30).requires_grad_()
    weight = hidden_states(2, 30, seed=1)
    first, state = block(x[:, :13], return_state=True)
    second, _ = block(x[:, 13:], state=state)
    (torch.cat([first, second], 1) * weight).sum().backward()
    cut = [x.grad.clone(), *(p.grad.clone() for p in block.parameters() if p.grad is not None)]
    assert len(cut) == 1 + len(list(block.parameters()))
    for label, parameter in block.named_parameters():
        assert float(parameter.grad.abs().max()) > 0, f"{label} gets no gradient"
    block.zero_grad()
    x.grad = None
    (block(x)[0] * weight).sum().backward()
    for number, (got, want) in enumerate(zip(cut, [x.grad, *(p.grad for p in block.parameters())], strict=True)):
        assert_close(f"gradient {number}", got, want, 1e-9, floor=1e-3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gates", ["head", "channel"])
def test_every_rule_in_a_layer(rule: str, gates: str) -> None:
    """A named rule that a layer can't feed or cut is only a name."""
    spec = small_spec(rule, gates=gates, gate_rank=3, lr_max=0.01)
    for letter in "mc":
        block, x = small_block(letter, spec, spread=0.05), hidden_states(2, 22)
        y, _ = block(x)
        first, state = block(x[:, :9], return_state=True)
        second, _ = block(x[:, 9:], state=state)
        assert_close(f"{letter}: outputs", torch.cat([first, second], 1), y, 1e-10)
        y.sum().backward()
        missing = [n for n, p in block.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
        assert not missing, f"{letter}: {missing}"


@pytest.mark.parametrize("letter", BLOCKS)
def test_states_have_the_batch_first_and_constant_size(letter: str) -> None:
    """Sessions are moved between batches row by row, and a stream's memory must not grow (full attention's does)."""
    block = small_block(letter, small_spec(persistent_tokens=2))
    sizes = []
    for tokens in (9, 50):
        _, state = block(hidden_states(3, tokens), return_state=True)
        assert all(x.shape[0] == 3 for x in state_tensors(state))
        sizes.append([x.shape for x in state_tensors(state)])
    assert (sizes[0] == sizes[1]) == (letter != "a")


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_zeroed_reads_cut_the_memory_out(name: str) -> None:
    """The quickstart shows retrieval at chance without memory reads: that is only honest if nothing leaks past."""
    letter, changes = BLOCK_CASES[name]
    block = small_block(letter, small_spec(**changes | {"conv": 0}))
    x = hidden_states(1, 24)
    other = x.clone()
    other[:, :8] += 1.0
    with torch.no_grad():
        assert float((block(x)[0] - block(other)[0])[:, 16:].abs().max()) > 1e-5
        block.zero_memory_reads = True
        assert float((block(x)[0] - block(other)[0])[:, 16:].abs().max()) == 0.0


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_probe_shows_the_inner_loop_and_changes_nothing(name: str) -> None:
    """Metrics that alter the run, or that show no learning where there is some, mislead."""
    letter, changes = BLOCK_CASES[name]
    block, x = small_block(letter, small_spec(**changes), spread=0.02), hidden_states(2, 30)
    plain, _ = block(x)
    block.probe = {}
    y, _ = block(x, cu_seqlens=torch.tensor([0, 30]))
    assert torch.equal(y, plain)
    expected = {"surprise", "inner_loss_before", "inner_loss_after", "state_norm", "momentum_norm"}
    assert set(block.probe) == expected | {"keep", "momentum", "lr"}
    assert 0 < block.probe["inner_loss_after"] < block.probe["inner_loss_before"]
    assert 0.9 < block.probe["keep"] < 1.0
    assert 0.05 < block.probe["momentum"] < 0.2


def probe_of(block: torch.nn.Module, x: torch.Tensor, **more: Any) -> dict[str, float]:
    """What the block's probe shows of one pass."""
    block.probe = {}
    with torch.no_grad():
        block(x, **more)
    shown, block.probe = block.probe, None
    return shown


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_probe_shows_the_same_of_a_stream_that_is_cut(name: str) -> None:
    """Else the figures jump with the number of pieces; the second part begins inside a chunk and a segment."""
    block, x = named_block(name), hidden_states(2, 30)
    with torch.no_grad():
        _, state = block(x[:, :21], return_state=True)
    shown = probe_of(block, x[:, 21:], state=state)
    assert shown == pytest.approx(probe_of(block, x), rel=1e-10)


@pytest.mark.parametrize("name", MEMORY_CASES)
def test_probe_shows_a_document_not_its_neighbours_or_pads(name: str) -> None:
    """Memories alone show the first row's last document, MAC the longest: its last segment is padded in row 0."""
    block, x = named_block(name), hidden_states(2, 30)
    shown = probe_of(block, x, cu_seqlens=[torch.tensor([0, 13, 30]), torch.tensor([0, 10, 30])])
    alone = x[1:, 10:] if name.startswith("mac") else x[:1, 13:]
    assert shown == pytest.approx(probe_of(block, alone), rel=1e-10)


def test_only_projections_are_decayed() -> None:
    """Weight decay on W_0, gates, norms, convolutions or persistent rows pulls the memory to nothing (rules 12.6)."""
    for letter in BLOCKS:
        block = build_block(letter, small_spec(persistent_tokens=2, memory_tokens=2), PlainLinear(), 1)
        decayed = {n for n, p in block.named_parameters() if not getattr(p, "no_weight_decay", False)}
        assert decayed and all(n.split(".")[-2] in ("query", "key_value", "gate", "out") for n in decayed), decayed


def test_bfloat16_blocks_keep_float32_memory() -> None:
    """A state rounded to bfloat16 forgets small writes."""
    for letter in BLOCKS:
        block = build_block(letter, small_spec(persistent_tokens=2), PlainLinear(), 1).bfloat16()
        y, state = block(hidden_states(2, 20).bfloat16(), return_state=True)
        assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())
        memory = {"m": lambda s: s, "c": lambda s: s["lane"], "g": lambda s: s["memory"]}
        if letter in memory:
            assert memory[letter](state)["memory"].weights[0].dtype == torch.float32


def test_wrong_blocks_are_refused_by_name() -> None:
    """A size that does not fit must be told before hours of training, all of them at once."""
    with pytest.raises(ValueError, match=r"pattern letter 'z'.*m, c, g, w, a"):
        build_block("z", small_spec(), PlainLinear(), 1)
    with pytest.raises(ValueError, match=r"(?s)hidden = 10.*heads \(4\).*gates = 'row'.*window = 0"):
        BlockSpec(hidden=10, heads=4, gates="row", window=0)
    with pytest.raises(ValueError, match="even head width"):
        build_block("w", BlockSpec(hidden=9, heads=3, rule=make_rule("titans")), PlainLinear(), 1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        named_block("lmm")(hidden_states(1, 5), cu_seqlens=torch.tensor([0, 3]))
