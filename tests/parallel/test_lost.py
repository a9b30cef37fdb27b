"""Whoever watches a run learns that a rank is gone, and which; a fault of this program stays a traceback."""

from __future__ import annotations

from types import FunctionType

import pytest

from miras_megatron.parallel.lost import RankLost, as_loss


def raised_in(module: str, error: Exception) -> Exception:
    """`error`, raised by a function of `module`."""

    def raises() -> None:
        raise error

    try:
        FunctionType(raises.__code__, {"__name__": module}, closure=raises.__closure__)()
    except Exception as found:
        return found
    raise AssertionError


@pytest.mark.parametrize(
    ("module", "said", "lost"),
    [
        ("torch.distributed.distributed_c10d", "[gloo] Timed out waiting 5000ms for recv operation", True),
        ("megatron.core.pipeline_parallel.p2p_communication", "Connection closed by peer [127.0.0.1]:1", True),
        ("torch.distributed.distributed_c10d", "wait timeout after 5000ms, keys: /world/0//cpu//0/1", True),
        ("miras_megatron.parallel.shares", "Read error [127.0.0.1]:1: Connection reset by peer", True),
        ("torch.distributed.distributed_c10d", "tensors differ in size", False),
        ("megatron.core.transformer.mlp", "", False),
        ("miras_megatron.training.data", "Connection closed by peer", False),
    ],
)
def test_only_a_failed_wait_means_that_a_rank_is_gone(module: str, said: str, lost: bool) -> None:
    """Exit code 4 makes a scheduler start the run again on other machines: a fault would be started for ever."""
    found = as_loss(raised_in(module, RuntimeError(said)), "rank 3 (dp0 pp1 cp0 tp0)")
    assert (found is not None) == lost
    if found is not None:
        assert str(found).startswith(f"rank 3 (dp0 pp1 cp0 tp0) lost another rank in a collective: {said}")
    assert as_loss(RankLost("as told"), "rank 3") is None
