"""The other side of `hf_check`, a program of its own: FOLDER SCRATCH TOKENS. Loads as a user would, nothing of ours.

Reads tokens.0, tokens.1, .. [1, T] from SCRATCH/given.safetensors; writes logits.0, .. [T, V] float32 and `text`, the
tokens that greedy generation with a cache puts after tokens.1, to SCRATCH/found.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

for name in ("miras_megatron", "miras_kernels", "miras_launch", "miras_tools"):
    sys.modules[name] = None  # type: ignore[assignment]  # so that importing it fails, installed or not


def main(folder: str, scratch: str, tokens: int) -> None:
    """Load, run, write."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    model = model.eval().to(device)
    given = load_file(Path(scratch) / "given.safetensors")
    rows = [given[f"tokens.{i}"].to(device) for i in range(len(given))]
    with torch.inference_mode():
        found = {f"logits.{i}": model(row).logits[0].float().cpu() for i, row in enumerate(rows)}
        model.generation_config.eos_token_id = None  # the comparison is of a fixed number of tokens
        text = model.generate(rows[1], max_new_tokens=tokens, do_sample=False, use_cache=True)
    found["text"] = text[0, rows[1].shape[1] :].cpu()
    save_file({name: x.contiguous() for name, x in found.items()}, Path(scratch) / "found.safetensors")
    print(f"loaded by transformers {transformers.__version__}, torch {torch.__version__}, {device}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
