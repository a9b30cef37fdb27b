"""The whole model on one rank: it learns, it streams, it keeps documents apart, it never looks ahead."""

import pytest
import torch
from helpers.models import VOCAB, random_tokens, small_run
from helpers.numerics import assert_close

from miras_megatron.model import language_model
from miras_megatron.model.build import build_model
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.training.loss import summed_loss

LETTERS = ["m", "c", "g", "w", "a", "mcgwa"]


@pytest.fixture(scope="module")
def mesh():
    with ParallelMesh(device="cpu") as alone:
        yield alone


def _double(pattern, mesh, **changes):
    return build_model(small_run(pattern, **changes), mesh).double()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_learns(mesh, precision):
    """Every part takes part: all weights get a gradient and a few steps on one row lower the loss."""
    model = build_model(small_run("mcgwa", precision=precision, tie_embeddings=precision == "fp32"), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = random_tokens(2, 20)
    losses = []
    for _ in range(6):
        total, count = summed_loss(model(tokens[:, :-1], tokens[:, 1:]))
        (total / count).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    assert losses[-1] < losses[0] - 0.5
    assert total.dtype == torch.float32


@pytest.mark.parametrize("pattern", LETTERS)
@pytest.mark.parametrize("cuts", [[1] * 15, [4, 1, 7, 3]])
@torch.no_grad()
def test_a_stream_in_any_cuts_is_one_pass(mesh, pattern, cuts):
    """Generation reads a token at a time; it must continue the very model that was trained."""
    model = _double(pattern, mesh).eval()
    tokens = random_tokens(2, sum(cuts))
    whole = model(tokens)
    assert whole.shape == (2, sum(cuts), VOCAB)
    states, parts = None, []
    for part in tokens.split(cuts, dim=1):
        logits, states = model(part, states=states, return_states=True)
        parts.append(logits)
    assert_close("logits", torch.cat(parts, 1), whole, rtol=1e-10)
    assert sorted(states) == list(range(1, len(pattern) + 1))


@torch.no_grad()
def test_documents_in_a_row_do_not_see_each_other(mesh):
    """Packing is a way to save work, not to mix texts: each document reads as if alone in its row."""
    model = _double("mcgwa", mesh)
    rows = [[5, 1, 9, 8], [8, 15]]
    tokens = random_tokens(2, 23)
    packed = model(tokens, cu_seqlens=[torch.tensor([0, *lengths]).cumsum(0) for lengths in rows])
    for row, lengths in enumerate(rows):
        for document, got in zip(tokens[row].split(lengths), packed[row].split(lengths), strict=True):
            assert_close(f"row {row}", got, model(document[None])[0], rtol=1e-10)


@pytest.mark.parametrize("pattern", LETTERS)
@torch.no_grad()
def test_no_token_sees_a_later_one(mesh, pattern):
    """A leak of one token makes the training loss a lie."""
    model, length = _double(pattern, mesh), 14
    tokens = random_tokens(1, length)
    changed = tokens.repeat(length, 1)
    changed[range(length), range(length)] = (tokens[0] + 1) % VOCAB
    moved = (model(changed) - model(tokens)).abs().amax(-1) > 1e-12
    assert not moved.tril(-1).any(), f"first leak at (changed, seen) = {moved.tril(-1).nonzero()[0].tolist()}"
    assert moved.diagonal().all(), "a token must see itself"


def test_recomputed_layers_are_the_same_layers(mesh):
    """Recomputation trades time for memory, never for other gradients."""
    tokens, gradients = random_tokens(2, 17), []
    for recompute in (False, True):
        model = _double("mcg", mesh, recompute=recompute)
        summed_loss(model(tokens[:, :-1], tokens[:, 1:]))[0].backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(name, gradients[1][name], gradient, rtol=1e-12)


def test_losses_are_those_of_the_logits(mesh):
    """The number that is trained on, masked and counted, against torch's own cross entropy."""
    model = _double("mw", mesh, tie_embeddings=False)
    tokens = random_tokens(3, 12)
    mask = (torch.arange(33).view(3, 11) % 4 > 0).float()
    losses = model(tokens[:, :-1], tokens[:, 1:], mask)
    logits = model(tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert_close("losses", losses, expected.view(3, 11) * mask, rtol=1e-12)
    total, count = summed_loss(losses, mask)
    assert count.item() == mask.sum().item() and count.dtype == torch.int32
    assert_close("total", total, (expected.view(3, 11) * mask).sum(), rtol=1e-12)
    assert_close("core's", model.float()(tokens[:, :-1], tokens[:, 1:], mask), losses, rtol=1e-5)


def test_losses_in_blocks_are_the_same(mesh, monkeypatch):
    """Half a million tokens of a 32K vocabulary must not be held as 64 GB of logits, nor give other gradients."""
    tokens, results = random_tokens(2, 18), []
    for at_once in (1 << 25, 2 * VOCAB * 5):
        monkeypatch.setattr(language_model, "LOGITS_AT_ONCE", at_once)
        model = _double("m", mesh)
        losses = model(tokens[:, :-1], tokens[:, 1:])
        losses.sum().backward()
        results.append((losses, model.embedding.word_embeddings.weight.grad))
    assert_close("losses", results[1][0], results[0][0], rtol=1e-12)
    assert_close("gradient", results[1][1], results[0][1], rtol=1e-12)


def test_a_row_without_tokens_that_count_is_zero_not_nan():
    """Prompts may fill a whole row; 0 x inf or 0 / 0 there would end the run."""
    total, count = summed_loss(torch.tensor([[torch.inf, 2.0]]), torch.zeros(1, 2))
    assert total.item() == 0 and count.item() == 0
