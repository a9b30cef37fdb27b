"""Validation by hand: nats, tokens, bytes, and where in the row they are."""

import math

import pytest
import torch
from helpers.tiny_run import tiny_config

from miras_megatron.compat.cpu import core_without_cuda
from miras_megatron.config.load import load_run
from miras_megatron.parallel.cut import Cut
from miras_megatron.parallel.mesh import ParallelMesh
from miras_megatron.training.batch import Batch, cut_for_rank
from miras_megatron.training.build_job import build_job
from miras_megatron.training.evaluate import evaluate, measure
from miras_megatron.training.tokenizer import ByteTokenizer, train_bpe, with_vocabulary


def batch_of(labels, mask):
    labels, mask = torch.tensor(labels), torch.tensor(mask)
    nothing = torch.zeros(len(labels), dtype=torch.int64)
    return Batch(labels, labels, mask, None, nothing == 0, nothing, nothing)


def test_sums_by_position():
    """A ragged row of five in two buckets: the first has three positions, a masked token counts nowhere."""
    batch = batch_of([[97, 98, 256, 99, 100], [97, 97, 97, 97, 256]], [[1.0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    losses = torch.tensor([[1.0, 2, 3, 4, 100], [1, 1, 1, 1, 1]])
    got = measure(batch, losses, ByteTokenizer(), 2).tolist()
    assert got == [15.0, 9.0, 7.0, 1 + 2 + 3 + 3, 4 + 2, 6.0, 3.0]


def test_without_buckets_nothing_is_said_of_positions():
    """0 turns it off."""
    batch = batch_of([[97, 98]], [[1.0, 1.0]])
    assert measure(batch, torch.ones(1, 2), ByteTokenizer(), 0).tolist() == [2.0, 2.0, 2.0]


def test_slices_of_a_row_have_the_bytes_of_the_row(tmp_path):
    """Else bits per byte change with the number of ranks: cuts through characters, and between masked tokens."""
    text = "la mémoire garde ce qui la surprend — même en français"
    tokenizer = train_bpe(iter([text[:10]] * 20), 270, tmp_path / "tokenizer.json")
    ids = [*tokenizer.encode(text), tokenizer.eod]
    batch = batch_of([ids], [[float(place % 7 > 0) for place in range(len(ids))]])
    losses = torch.rand(1, len(ids))
    whole = measure(batch, losses, tokenizer, 3)
    assert whole[2] < len(text.encode())
    for pieces in (2, 3, 6):
        cut, parts = Cut.even(len(ids), pieces, pieces // 2 + 1), []
        for rank in range(cut.ranks):
            own = cut_for_rank(batch, cut, rank)
            parts.append(measure(own, losses[:, cut.places(rank)], tokenizer, 3))
        torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)


def test_an_untrained_model_knows_nothing(tmp_path):
    """Uniform over 257 symbols, at every place: what a wrong mask, label shift or unit would break."""
    run = with_vocabulary(load_run(tiny_config(tmp_path)))
    with core_without_cuda(), ParallelMesh(run.parallel) as mesh:
        job = build_job(run, mesh)
        got = evaluate(job, job.validation)
        assert evaluate(job, job.validation) == got
        assert all(p.grad is None or not p.grad.any() for p in job.model.parameters())
    rows = math.log(job.model.vocab_size)
    assert got["loss"] == pytest.approx(rows, rel=0.02)
    assert got["by_position"] == pytest.approx([rows] * 4, rel=0.05)
    assert 0 < got["tokens"] <= 96
