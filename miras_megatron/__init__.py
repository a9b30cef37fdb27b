"""Miras-Megatron: test-time memory language models on Megatron-core."""

__version__ = "0.1.0"
