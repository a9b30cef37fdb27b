"""Command line tools around miras_megatron: preprocessing, benchmarks, inspection."""

import miras_megatron.compat  # noqa: F401  # silences what megatron-core warns of at import, whoever imports it first
