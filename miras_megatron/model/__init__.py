"""The language model: memory blocks in megatron-core's transformer."""
