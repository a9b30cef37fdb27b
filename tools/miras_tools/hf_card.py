"""README.md of an exported folder: what the model is, how to load it, how and on what it was trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from miras_megatron.config.describe import dump_run
from miras_megatron.config.schema import PATTERN_LETTERS, Run
from miras_megatron.training.manifest import Manifest, read_manifest

from .hf_shapes import weight_shapes

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [miras, titans, custom_code]
---
# {title}

A language model of {parameters:,} parameters with a memory that learns while it reads, trained with Miras-Megatron for
{step:,} steps. Its state has a constant size{grows}.

| | |
| --- | --- |
| layers | {layers}: {letters} |
| memory | rule {rule}, chunks of {chunk} tokens |
| width, heads | {hidden}, {heads} |
| vocabulary | {vocabulary:,} |
| trained on rows of | {length:,} tokens |
| precision | {precision}; gates, memory and norms are float32 |

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, dtype="auto")
inputs = tokenizer("It is a", return_tensors="pt"{plain})
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
The code in this folder (Apache-2.0) needs torch and transformers 4.57 or newer; `trust_remote_code=True` lets it run.
Rows of a batch may be padded on either side. A state of any text can be kept: what `generate` or a call returns as its
cache goes on from there; `cache.save(path)` writes it, `model.load_cache(path)` reads it.{note}

lm-eval takes its longest input from `max_position_embeddings`, the length of training rows; `max_length` in
`--model_args` sets another, of any size.
"""

NOTE = """

Training saw text without the special tokens that this tokenizer adds by itself: call it with
`add_special_tokens=False`."""


def write_card(folder: Path, run: Run, public: Run, step: int, adds_tokens: bool) -> None:
    """Write README.md for `run`, trained for `step` steps; `public` is what is told of its configuration."""
    parts = [_head(public, step, adds_tokens), *_data(run), "\n## Training configuration\n"]
    parts.append(f"```yaml\n{dump_run(public, comments=False)}```\n")
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def parameters(run: Run) -> int:
    """Of the exported model: without vocabulary padding."""
    shapes = weight_shapes(run)
    padding = run.model.padded_vocab() - (run.model.vocab_size or 0)
    tables = sum(shape[0] == run.model.padded_vocab() for name, shape in shapes.items() if "layers" not in name)
    return sum(math.prod(shape) for shape in shapes.values()) - tables * padding * run.model.hidden


def _head(run: Run, step: int, adds_tokens: bool) -> str:
    model = run.model
    letters = ", ".join(f"{model.letters.count(x)} {PATTERN_LETTERS[x]}" for x in dict.fromkeys(model.letters))
    return HEAD.format(
        title=run.run.title,
        parameters=parameters(run),
        step=step,
        grows=" but for its layers of full attention, which keep every token" if "a" in model.letters else "",
        layers=model.layers,
        letters=letters,
        rule=run.memory.rule,
        chunk=run.memory.chunk_size,
        hidden=model.hidden,
        heads=model.heads,
        vocabulary=model.vocab_size,
        length=run.data.sequence_length,
        precision=run.training.precision,
        plain=", add_special_tokens=False" if adds_tokens else "",
        note=NOTE if adds_tokens else "",
    )


def _data(run: Run) -> Iterator[str]:
    yield "## Data\n"
    for weight, prefix in run.data.train_blend:
        manifest = None if prefix == "shipped" else _manifest(prefix)
        share = f"{Path(prefix).name} ({weight:.1%})"
        if prefix == "shipped":
            yield f"- {share}: the novels that ship with Miras-Megatron"
        elif manifest is None:
            yield f"- {share}: no manifest beside it"
        else:
            yield f"- {share}: {_described(manifest)}"


def _manifest(prefix: str) -> Manifest | None:
    try:
        return read_manifest(prefix)
    except ValueError:
        return None


def _described(manifest: Manifest) -> str:
    digests = [str(entry["sha256"])[:16] for entry in manifest.files.values() if "sha256" in entry]
    return (
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens, {manifest.text_bytes:,} bytes of text, "
        f"{len(manifest.sources)} files, tokenizer {Path(manifest.tokenizer).name} "
        f"({manifest.tokenizer_digest[:16]}); SHA-256 {', '.join(digests)}"
    )
