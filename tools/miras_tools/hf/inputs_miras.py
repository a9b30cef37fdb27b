"""What a model is given beside its tokens: which inputs it refuses, which tokens are pads, which labels count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx", "seq_lengths")
"""What collators call the borders of documents that share a row."""


def real_tokens(mask: Tensor | None, batch: int, tokens: int, seen: int) -> Tensor:
    """[B, T] bool on the CPU: no pads. Raises ValueError for a mask that says nothing about these tokens."""
    if mask is None:
        return torch.ones(batch, tokens, dtype=torch.bool)
    if mask.dim() != 2 or mask.shape[0] != batch:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: a memory reads every real token; give [{batch}, {tokens}], "
            "1 at tokens and 0 at pads"
        )
    if mask.shape[1] < tokens or (mask.shape[1] > tokens and not seen):
        raise ValueError(f"attention_mask is {mask.shape[1]} wide, the tokens are {tokens}: give one column a token")
    return mask[:, -tokens:].bool().cpu()


def refuse_empty(x: Tensor) -> None:
    """Raises ValueError where x [B, T, d] has no row or no token."""
    if x.dim() != 3 or not x.numel():
        raise ValueError(
            f"tokens of shape {tuple(x.shape[:-1])}: give [batch, tokens] with at least one of each; generate() without"
            " input begins with the token that texts begin with"
        )


def refuse_read(cache: Any, given: dict[str, Any]) -> None:
    """Raises ValueError where a cache has read all that `generate` is given: it would read it once more.

    Without pads some versions of transformers give no mask, but positions.
    """
    told = next((given[n] for n in ("attention_mask", "position_ids") if given.get(n) is not None), None)
    if told is not None and told.dim() == 2 and told.shape[1] <= cache.get_seq_length():
        raise ValueError(
            f"the cache has read {cache.get_seq_length()} tokens and pads, and the prompt has {told.shape[1]}: give the"
            " whole text so far with at least one token more, or the new tokens alone with an attention_mask over all"
        )


def refuse_packed(position_ids: Tensor | None, real: Tensor, others: dict[str, Any]) -> None:
    """Raises ValueError where a row holds several documents: their memories would be one.

    Positions at pads mean nothing; those of a row's tokens rise by one, or as their columns do.
    """
    way_out = "give each document a row of its own, padded (attention_mask)"
    if given := [name for name in PACKED if others.get(name) is not None]:
        raise ValueError(f"{given[0]}: rows that hold several documents can't be told apart here; {way_out}")
    if position_ids is None:
        return
    batch, tokens = real.shape
    if tuple(position_ids.shape) not in ((1, tokens), (batch, tokens)):
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}: give [{batch}, {tokens}], or none")
    columns = torch.arange(tokens)
    for places, row in zip(position_ids.cpu().expand(batch, -1), real, strict=True):
        steps, wide = places[row].diff(), columns[row].diff()
        if not (bool((steps == 1).all()) or torch.equal(steps, wide.to(steps.dtype))):
            raise ValueError(f"position_ids that don't rise by one token after token: {way_out}, and no position_ids")


def countable(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Labels without those that a pad would predict: what comes out there is no word about the row's next token."""
    if mask is None:
        return labels
    labels, pads = labels.clone(), mask[:, -labels.shape[1] :].to(labels.device) == 0
    labels[:, 1:][pads[:, :-1]] = -100
    return labels


def without_ended(inputs: dict[str, Any], made: Tensor, ends: Tensor, pad: Tensor) -> dict[str, Any]:
    """Inputs of a generating step, with 0 in the mask at pads that rows are fed after their end.

    made  [B, n] tokens generated so far; ends, pad  ids that end a row, and that follow its end
    """
    stop, fill = ends.to(made.device).flatten(), pad.to(made.device).flatten()
    after = torch.isin(made, stop).cumsum(1).roll(1, 1)
    after[:, 0] = 0
    ended = torch.isin(made, fill) & (after > 0)
    if not bool(ended.any()):
        return inputs
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(inputs["input_ids"]) if mask is None else mask.clone()
    width = min(made.shape[1], mask.shape[1])
    mask[:, -width:][ended[:, -width:].to(mask.device)] = 0
    return inputs | {"attention_mask": mask}
