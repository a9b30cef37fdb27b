"""What every rank needs, imported once in the process that ranks are forked from (`ranks`)."""

import miras_megatron.training.loop
import miras_megatron.training.main  # noqa: F401
