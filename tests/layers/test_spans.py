"""A stream taken span by span gives what it gives at once: what backward recomputes is what forward had."""

from __future__ import annotations

import pytest
import torch

from miras_megatron.layers import spans, stream
from miras_megatron.layers.block_spec import BlockSpec
from miras_megatron.layers.carry import LOCAL
from miras_megatron.layers.documents import join_trees
from miras_megatron.layers.linear import PlainLinear
from miras_megatron.layers.memory_mixer import MemoryMixer
from miras_megatron.memory import make_rule


def gradients(mixer, x, state=None):
    """Outputs, end state's leaves and gradients of one pass."""
    x = x.clone().requires_grad_()
    out, after = mixer(x, state=state, return_state=True)
    last = [*after["memory"].weights, after["query"], after["key_value"]]
    loss = out.square().sum() + sum(y.square().sum() for y in last)
    grads = torch.autograd.grad(loss, [x, *mixer.parameters()], allow_unused=True)
    return [out, *last, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("rule", [make_rule("titans"), make_rule("yaad"), make_rule("titans", depth=1, momentum=False)])
@pytest.mark.parametrize("warm", [False, True])
def test_spans_change_nothing(monkeypatch, rule, warm):
    """Else training with the saving would train another model; `warm` starts inside a chunk, 37 tokens cut raggedly."""
    generator = torch.Generator().manual_seed(0)
    spec = BlockSpec(rule=rule, hidden=16, heads=2, chunk_size=4, checkpoint_every=2)
    mixer = MemoryMixer(spec, PlainLinear(generator), generator).double()
    x = torch.randn(2, 37, 16, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        state = mixer(x[:, :5], return_state=True)[1] if warm else None
    whole = gradients(mixer, x, state)
    monkeypatch.setattr(spans, "LEAST_TOKENS", 8)
    assert stream.takes_spans(mixer.core, x, state, None, LOCAL)
    cut = gradients(mixer, x, state)
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_a_graph_that_is_kept_goes_back_twice():
    """A recomputed tensor is handed out once; a second backward computes it again."""

    def step(x, state, replays):
        return ((x.exp() * state,), state + 1.0)

    x = torch.randn(1, 700, 2, dtype=torch.float64, requires_grad=True)
    (y,), _ = spans.walk_spans(step, x, torch.zeros(1, dtype=torch.float64), 64, 8)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], first)


def test_rows_at_different_places_of_their_chunks_take_no_spans(monkeypatch):
    """Lanes of long documents join such rows; a replay that took one phase for all would break their backward."""
    generator = torch.Generator().manual_seed(0)
    spec = BlockSpec(rule=make_rule("titans"), hidden=16, heads=2, chunk_size=4, checkpoint_every=2)
    mixer = MemoryMixer(spec, PlainLinear(generator), generator).double()
    x = torch.randn(2, 37, 16, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        states = [mixer(x[row : row + 1, :length], return_state=True)[1] for row, length in ((0, 5), (1, 6))]
    monkeypatch.setattr(spans, "LEAST_TOKENS", 8)
    joined = join_trees(states)
    assert not stream.takes_spans(mixer.core, x, joined, None, LOCAL)
    together = mixer(x, state=joined)[0]
    for row in (0, 1):
        alone = mixer(x[row : row + 1], state=states[row])[0]
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-9, atol=1e-11)
