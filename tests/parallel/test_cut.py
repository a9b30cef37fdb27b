"""Where rows are cut: every token on one rank, in order, with the documents it belongs to."""

from __future__ import annotations

import pytest
import torch

from miras_megatron.parallel.cut import Cut, documents_of_piece


@pytest.mark.parametrize(("tokens", "pieces", "ranks"), [(47, 6, 3), (48, 4, 2), (5, 5, 1), (100, 1, 1), (9, 8, 4)])
def test_ranks_share_a_row_once(tokens: int, pieces: int, ranks: int) -> None:
    """A token read twice, or never, counts wrongly in the loss."""
    cut = Cut.even(tokens, pieces, ranks)
    slices = [cut.places(rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(slices).sort().values, torch.arange(tokens))
    assert [len(here) for here in slices] == [sum(cut.lengths(rank)) for rank in range(ranks)]
    lengths = [cut.length(piece) for piece in range(pieces)]
    assert max(lengths) - min(lengths) <= 1


def test_too_few_tokens_are_refused() -> None:
    """An empty piece has no state to hand on."""
    with pytest.raises(ValueError, match="3 tokens can't be cut into 4 pieces"):
        Cut.even(3, 4)


def test_documents_inside_a_piece() -> None:
    """A document that starts at a border starts anew; one that began before goes on from its state."""
    rows = [torch.tensor([0, 4, 10, 20]), torch.tensor([0, 20]), torch.tensor([0, 9, 11, 20])]
    inside, before = documents_of_piece(rows, 3, 10, 15)
    assert inside is not None
    assert [row.tolist() for row in inside] == [[0, 5], [0, 5], [0, 1, 5]]
    assert before == [0, 10, 1]
    assert documents_of_piece(None, 2, 10, 15) == (None, [10, 10])
    one, starts = documents_of_piece(torch.tensor([0, 10, 12, 20]), 2, 10, 15)
    assert one is not None and [row.tolist() for row in one] == [[0, 2, 5]] * 2 and starts == [0, 0]
