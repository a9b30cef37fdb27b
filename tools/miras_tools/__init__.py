"""Command line tools around miras_megatron: preprocessing, benchmarks, inspection."""
