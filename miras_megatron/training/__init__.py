"""Data, the training loop, checkpoints, evaluation and generation. Importing this package imports nothing else."""
