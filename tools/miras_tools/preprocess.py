"""miras-preprocess: text files to Megatron's PREFIX_text_document.bin and .idx, with a manifest.

Memory stays bounded whatever the length of a document; a run that is killed is finished by the same command, byte for
byte.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from miras_megatron.training.atomic_write import write_atomically
from miras_megatron.training.manifest import (
    Manifest,
    describe_file,
    manifest_path,
    read_manifest,
    write_manifest,
)
from miras_megatron.training.token_writer import token_dtype
from miras_megatron.training.tokenizer import Tokenizer, load_tokenizer, train_bpe

from .encode import without_surrogates
from .length_report import Progress, describe
from .preprocess_options import Options, parse, plan_digest, plan_of
from .preprocess_parts import ENDINGS, Counts, Parts
from .text_sources import Slice, find_files, plan_units, read_documents
from .unit_pool import Job, Work, run_jobs

Units = list[tuple[Slice, ...]]


def main(argv: list[str] | None = None) -> int:
    """0: done; 2: bad input, said in one line, nothing left behind; 1: a worker died; 130: interrupted."""
    options = parse(argv)
    try:
        return verify(options.verify) if options.verify else preprocess(options)
    except ValueError as error:
        return _say(f"error: {error}", 2)
    except OSError as error:
        return _say(f"error: {error.filename or ''}: {error.strerror or error}; free some space or correct the path", 2)
    except BrokenProcessPool:
        return _say("a worker died (out of memory?); the same command goes on where it stopped, try fewer --workers", 1)
    except KeyboardInterrupt:
        return _say("interrupted; the same command goes on where it stopped", 130)


def preprocess(options: Options) -> int:
    """Plan, tokenise unit by unit, join; raises ValueError on bad input after removing what it had begun."""
    paths = find_files(options.input)
    units = plan_units(paths, options.unit_bytes)
    if options.dry_run:
        return _dry_run(options, units)
    prefix = f"{options.output_prefix}_text_document"
    plan = plan_of(options, paths)
    parts = Parts(prefix)
    if not parts.begun and _stands_already(options, prefix, plan):
        return 0
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    if parts.open(plan):
        print(f"going on with {parts.folder}", file=sys.stderr)
    try:
        _finish(options, parts, units, plan)
    except ValueError:
        parts.remove()
        raise
    return 0


def verify(prefix: str) -> int:
    """Compare a pair with its manifest, checksums included."""
    bare = prefix.removesuffix(".bin").removesuffix(".idx")
    manifest = read_manifest(bare)
    if manifest is None:
        bare += "_text_document"
        manifest = read_manifest(bare)
    if manifest is None:
        raise ValueError(
            f"--verify {prefix}: there is no {manifest_path(prefix)}; only sets with a manifest can be verified"
        )
    for ending, wanted in manifest.files.items():
        if not Path(bare + ending).exists():
            raise ValueError(f"{bare}{ending} is missing; run miras-preprocess again with --overwrite")
        if describe_file(bare + ending) != wanted:
            raise ValueError(f"{bare}{ending} differs from its manifest; run miras-preprocess again with --overwrite")
    print(f"{bare}: {', '.join(manifest.files)} are as the manifest says")
    return 0


def _finish(options: Options, parts: Parts, units: Units, plan: dict[str, Any]) -> None:
    tokenizer = _tokenizer(options, units, parts.folder / "tokenizer.json")
    dtype = token_dtype(tokenizer.vocab_size)
    counts = _tokenise(options, parts, units, tokenizer)
    if not counts.documents:
        raise ValueError(f"--input {' '.join(options.input)}: holds no text; correct the path or --text-key")
    manifest_path(parts.prefix).unlink(missing_ok=True)
    files = parts.join(len(units), dtype, with_masks=counts.prompts > 0)
    for ending in ENDINGS:
        if ending not in files and Path(parts.prefix + ending).exists():
            files[ending] = describe_file(parts.prefix + ending)
    if options.train_bpe:
        write_atomically(_trained_path(options), (parts.folder / "tokenizer.json").read_text(encoding="utf-8"))
    write_manifest(parts.prefix, _manifest(options, tokenizer, dtype.name, counts, files, plan))
    parts.remove()
    print(describe(counts))
    print(f"\nwrote {parts.prefix}.bin, .idx and {manifest_path(parts.prefix).name}")
    name = _trained_path(options) if options.train_bpe else options.tokenizer
    whole = " --data.split=100,0,0" if counts.documents == 1 else ""  # one document can't be shared out
    print(f"next: miras-train CONFIG --data.train={parts.prefix} --data.tokenizer={name}{whole}")


def _tokenise(options: Options, parts: Parts, units: Units, tokenizer: Tokenizer) -> Counts:
    """Counts of all units, those that an earlier run did included."""
    total, jobs = Counts(), []
    for number, unit in enumerate(units):
        if (done := parts.done(number)) is not None:
            total.add(done)
        else:
            jobs.append(Job(number, unit, parts.stem(number)))
    return _run(options, jobs, tokenizer, total, len(units))


def _dry_run(options: Options, units: Units) -> int:
    """Count without writing; a BPE to train lives in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _tokenizer(options, units, Path(folder) / "tokenizer.json")
        jobs = [Job(number, unit, None) for number, unit in enumerate(units)]
        counts = _run(options, jobs, tokenizer, Counts(), len(units))
    itemsize = token_dtype(tokenizer.vocab_size).itemsize
    print(describe(counts))
    print(f"\na dry run: nothing was written; the tokens would take {counts.tokens * itemsize:,} bytes")
    return 0


def _run(options: Options, jobs: list[Job], tokenizer: Tokenizer, total: Counts, units: int) -> Counts:
    work = Work(tokenizer.name, options.eod, options.keys, options.append_eod, token_dtype(tokenizer.vocab_size))
    progress = Progress(units, options.log_interval)
    ready, before = units - len(jobs), total.text_bytes
    for _, counts in run_jobs(jobs, work, options.workers):
        total.add(counts)
        ready += 1
        progress.show(ready, total, total.text_bytes - before)
    return total


def _tokenizer(options: Options, units: Units, path: Path) -> Tokenizer:
    """The tokenizer of the run; one to train is trained once and kept at `path`."""
    if not options.train_bpe:
        return load_tokenizer(options.tokenizer, options.eod)
    if not path.exists():
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        trained = train_bpe(_sample(options, units), options.train_bpe, scratch, options.eod or "<|endoftext|>")
        os.replace(scratch, path)
        print(f"trained a BPE of {trained.vocab_size:,} ids", file=sys.stderr)
    return load_tokenizer(str(path), options.eod)


def _sample(options: Options, units: Units) -> Iterator[str]:
    """Text to train on: the beginning of every unit, about --train-bpe-bytes in all."""
    for unit in units:
        left = options.train_bpe_bytes // len(units)
        for document in (document for part in unit for document in read_documents(part, options.keys)):
            if left <= 0:
                break
            for piece in document.pieces:
                yield without_surrogates(piece[:left])
                left -= len(piece)
                if left <= 0:
                    break


def _stands_already(options: Options, prefix: str, plan: dict[str, Any]) -> bool:
    """Whether the same run was finished before; raises ValueError when something else is there and may not go."""
    ours = [manifest_path(prefix), *(Path(prefix + ending) for ending in ENDINGS)]
    ours += [_trained_path(options)] if options.train_bpe else []
    there = [path for path in ours if path.exists()]
    if not there or options.overwrite:
        return False
    manifest = read_manifest(prefix) if there[0] == manifest_path(prefix) else None
    if manifest is not None and manifest.plan == plan_digest(plan):
        print(f"{prefix} is whole already: same inputs, same settings")
        return True
    raise ValueError(f"{there[-1]} is there already; choose another --output-prefix, or give --overwrite to replace it")


def _manifest(
    options: Options, tokenizer: Tokenizer, dtype: str, counts: Counts, files: dict[str, Any], plan: dict[str, Any]
) -> Manifest:
    name = str(_trained_path(options)) if options.train_bpe else tokenizer.name
    return Manifest(
        tokenizer=name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        appends_eod=options.append_eod,
        dtype=dtype,
        documents=counts.documents,
        tokens=counts.tokens,
        text_bytes=counts.text_bytes,
        empty_documents=counts.empty,
        largest_token=counts.largest_token,
        loss_mask=counts.prompts > 0,
        histogram={str(bucket): counts.histogram[bucket] for bucket in sorted(counts.histogram)},
        sources=[
            {"path": path, "bytes": size, "documents": counts.by_source.get(path, 0)}
            for path, size, _ in plan["sources"]
        ],
        files={ending: files[ending] for ending in ENDINGS if ending in files},
        plan=plan_digest(plan),
    )


def _trained_path(options: Options) -> Path:
    return Path(f"{options.output_prefix}_tokenizer.json")


def _say(line: str, code: int) -> int:
    print(f"miras-preprocess: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
