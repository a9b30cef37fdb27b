"""Document borders of rows."""

from __future__ import annotations

import pytest
import torch

from miras_megatron.layers.documents import Documents


def test_documents_are_checked_and_empty_ones_dropped() -> None:
    """Borders that miss tokens would silently join documents."""
    documents = Documents.of(torch.tensor([0, 0, 4, 4, 9, 9]), 1, 9)
    assert documents is not None and documents.starts == ((0, 4),)
    assert Documents.of(torch.tensor([0, 9]), 3, 9) is None
    for wrong in ([0, 5], [1, 9], [0, 6, 4, 9], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            Documents.of(torch.tensor(wrong), 1, 9)
    with pytest.raises(ValueError, match="2 rows for a batch of 3"):
        Documents.of([torch.tensor([0, 9])] * 2, 3, 9)
