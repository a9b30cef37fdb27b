"""Ranks and what crosses between them: the only folder that talks to torch.distributed and parallel_state."""
