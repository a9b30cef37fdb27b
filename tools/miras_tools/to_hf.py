"""miras-to-hf RUN FOLDER: a checkpoint as a folder that transformers loads with nothing of ours installed.

Exit code 0: written and, unless --no-check, the same as the training model, and pushed where asked for; 1: FOLDER is
written, but isn't the same, couldn't be loaded or wasn't pushed; 2: bad input, said in one message, nothing written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from miras_megatron.compat.heap import give_back_large_blocks
from miras_megatron.config.describe import dump_run
from miras_megatron.config.schema import Run, blend
from miras_megatron.training.checkpoint import COMMON, saved_run
from miras_megatron.training.checkpoint_folder import find_checkpoint
from miras_megatron.training.checkpoint_manifest import damaged_files, refuse_damaged
from miras_megatron.training.generate import tokenizer_of
from miras_megatron.training.main import one_message, said_by_us
from miras_megatron.training.plain_files import read_plain
from miras_megatron.training.stored_tensors import StoredTensors
from miras_megatron.training.tokenizer import Tokenizer, load_tokenizer

from .hf_card import write_card
from .hf_check import compare, refuse_no_transformers
from .hf_code import write_code
from .hf_config import CONFIG, TRAINING, write_config
from .hf_hub import push, refuse_no_client
from .hf_tokenizer import adds_tokens, write_tokenizer
from .hf_weights import ExportedWeights
from .new_folder import new_folder, refuse_occupied, refuse_small_disk

EXAMPLES = """
examples:
  miras-to-hf runs/book exported/book
  miras-to-hf runs/book/checkpoints/step_00000500 exported/book_500 --max-shard-size 2GB
  miras-to-hf runs/book exported/book --no-check --push OWNER/NAME --private

Any layout of ranks is read, without a GPU and a tensor at a time. The check loads FOLDER in a fresh process and
compares logits and greedy text with the training model; it needs transformers and as much memory as the model.
Back again: miras-from-hf.
"""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring for the exit codes."""
    options = _parser().parse_args(argv)
    return one_message("miras-to-hf", lambda: export(options))


def export(options: argparse.Namespace) -> int:
    """Write, compare, upload. Raises ValueError for what a user can mend."""
    give_back_large_blocks()  # tensors come and go one by one: their room goes back, or the heap keeps holes
    target = Path(options.folder)
    _refuse_early(options, target)
    checkpoint = find_checkpoint(options.run, "RUN")
    with _told_when_gone(checkpoint):
        refuse_damaged(checkpoint, damaged_files(checkpoint))
        run, common = saved_run(checkpoint), read_plain(checkpoint / "common.pt", COMMON)
        step, tokenizer = int(common["step"]), _own_tokenizer(checkpoint, run, options.tokenizer, common["tokenizer"])
        _write(target, checkpoint, run, tokenizer, step, options.max_shard_size)
    try:
        print(f"wrote {target}: step {step} of {checkpoint.parent.parent}", flush=True)
        if options.check:
            print("compares it with the training model, in a process that has only transformers:", flush=True)
        if options.check and not _same(checkpoint, target, run, tokenizer, options.python):
            return 1
        if options.push:
            print(f"pushed to {push(target, options.push, options.private)}", flush=True)
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) and not said_by_us(error):
            raise
        print(f"miras-to-hf: {error}\n  {target} is written and stays", file=sys.stderr, flush=True)
        return 1
    return 0


@contextmanager
def _told_when_gone(checkpoint: Path) -> Iterator[None]:
    """Inside, what fails because the checkpoint went away meanwhile is no damage, and no earlier one is the way out."""
    try:
        yield
    except (ValueError, OSError):
        if checkpoint.exists():
            raise
        raise ValueError(
            f"RUN: {checkpoint} was removed while it was read, as a run that goes on does with old ones "
            "(checkpoint.keep); export again: the latest is read, or name one that stays"
        ) from None


def _refuse_early(options: argparse.Namespace, target: Path) -> None:
    """What needs no reading of the checkpoint."""
    refuse_occupied(target, "FOLDER")
    if options.push:
        refuse_no_client(options.push)
    if options.check:
        refuse_no_transformers(options.python)


def _own_tokenizer(checkpoint: Path, run: Run, given: str | None, digest: str) -> Tokenizer:
    """The tokenizer that the checkpoint was trained with. Raises ValueError where it is another one now."""
    name = given or tokenizer_of(checkpoint, run)
    tokenizer = load_tokenizer(name)
    if digest != tokenizer.digest:
        field = "--tokenizer" if given else "data.tokenizer"
        raise ValueError(
            f"{field} = {name!r}: has {tokenizer.vocab_size} tokens and digest {tokenizer.digest[:12]}; {checkpoint} "
            f"was trained with digest {digest[:12]}; name that tokenizer with --tokenizer PATH"
        )
    return tokenizer


def _write(target: Path, checkpoint: Path, run: Run, tokenizer: Tokenizer, step: int, max_bytes: int) -> None:
    """The whole folder, or none of it."""
    weights = ExportedWeights(StoredTensors(checkpoint), run)
    refuse_small_disk(target, "FOLDER", weights.nbytes)
    public = public_form(run)
    with new_folder(target, "FOLDER", last=CONFIG) as folder:
        weights.write(folder, max_bytes)
        write_config(folder, run, tokenizer)
        write_tokenizer(folder, tokenizer)
        write_code(folder)
        write_card(folder, run, public, step, adds_tokens(tokenizer))
        (folder / TRAINING).write_text(dump_run(public), encoding="utf-8")


def public_form(run: Run) -> Run:
    """The run without the folders of this machine, which mean nothing elsewhere and are nobody's business."""
    place, data = replace(run.run, dir=f"runs/{Path(run.run.dir).name}"), run.data
    named = replace(
        data,
        train=_last_parts(data.train),
        validation=None if data.validation is None else _last_parts(data.validation),
        tokenizer=Path(data.tokenizer).name,
        cache=None,
    )
    checkpoint, training = replace(run.checkpoint, resume="auto"), replace(run.training, init_from=None)
    return replace(run, run=place, data=named, checkpoint=checkpoint, training=training)


def _last_parts(entries: str | list[str]) -> str | list[str]:
    """Entries of data.train with the last part of each prefix; weights stay as they were written."""
    if isinstance(entries, list):
        return [str(_last_parts(entry)) for entry in entries]
    ((_, prefix),) = blend(entries)
    return entries.strip().removesuffix(prefix) + Path(prefix).name


def _same(checkpoint: Path, folder: Path, run: Run, tokenizer: Tokenizer, python: str) -> bool:
    """Whether the folder is the training model; the figures are printed either way."""
    findings = []
    for finding in compare(checkpoint, folder, run, tokenizer, python):
        print(f"  {'ok  ' if finding.good else 'FAIL'} {finding.what}: {finding.figure}", flush=True)
        findings.append(finding)
    if not all(finding.good for finding in findings):
        print(f"miras-to-hf: {folder} stays, but it isn't the model that was trained", file=sys.stderr, flush=True)
        return False
    return True


def _bytes(text: str) -> int:
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if parts is None or parts[2].upper() not in UNITS or float(parts[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a size above 0 such as 5GB, 500MB or 2GiB")
    return max(1, int(float(parts[1]) * UNITS[parts[2].upper()]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-to-hf",
        description="A checkpoint as a folder that AutoModelForCausalLM loads with nothing of ours installed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder (its latest checkpoint) or one of its checkpoints")
    add("folder", metavar="FOLDER", help="where to write; must not exist, or be empty")
    add("--max-shard-size", type=_bytes, default=5 * 10**9, metavar="SIZE", help="of a weights file (default: 5GB)")
    add("--tokenizer", metavar="PATH", help="where the run's tokenizer.json lies now (default: data.tokenizer)")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare with the training model")
    add("--python", default=sys.executable, metavar="PATH", help="the interpreter the check loads FOLDER in")
    add("--push", metavar="REPO", help="upload FOLDER to this model repository of a hub after the check")
    add("--private", action="store_true", help="where --push makes the repository, only its owner sees it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
