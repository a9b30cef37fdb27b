"""Ranks and what crosses between them. The only folder that talks to torch.distributed and megatron's parallel_state."""
