"""If these fail, a replay reads other states than it received, or what is kept holds several times its memory."""

from __future__ import annotations

import pytest
import torch

from miras_megatron.parallel import tape
from miras_megatron.parallel.tape import Pool, Tape


def mixed() -> list[torch.Tensor]:
    """Ragged, empty, not contiguous, of several dtypes."""
    x = torch.randn(3, 5)
    return [x, x.t(), torch.arange(7), torch.randn(1), torch.zeros(0, 4), torch.randn(2, 3).bfloat16(), x.double()]


def test_a_tape_gives_back_what_it_was_given() -> None:
    """Bit for bit, whatever becomes of the original."""
    for pool in (None, Pool()):
        given, kept = mixed(), Tape("host", pool)
        expected = [x.clone() for x in given]
        kept.keep("a", given)
        if pool is not None:
            for x in given:
                x.zero_()
        found = kept.read("a")
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
        assert kept.bytes == sum(x.numel() * x.element_size() for x in given)


def test_copies_share_blocks_and_nothing_else() -> None:
    """Many small packets take one piece of memory, and autograd takes them for tensors of their own."""
    pool, x = Pool(), torch.randn(3, 5, requires_grad=True)
    first, second = pool.copy(x * 2), pool.copy(x * 3)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.data_ptr() != second.data_ptr() and second.data_ptr() % tape.ALIGN == first.data_ptr() % tape.ALIGN
    assert not first.requires_grad and first._base is None
    first.zero_()
    assert torch.equal(second, (x * 3).detach())


def test_a_full_block_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is larger than a block has one of its own."""
    monkeypatch.setattr(tape, "BLOCK", 256)
    pool, given = Pool(), [torch.randn(20) for _ in range(5)] + [torch.randn(1000), torch.randn(3)]
    copies = [pool.copy(x) for x in given]
    assert all(torch.equal(a, b) for a, b in zip(copies, given, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in copies}) == 5
