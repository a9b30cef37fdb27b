"""miras-from-hf FOLDER RUN_DIR: an exported folder as a run folder with one checkpoint of step 0, weights only.

Exit code 0: written; 2: bad input, said in one message, nothing written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from miras_megatron.config.schema import Run
from miras_megatron.training.atomic_write import write_atomically
from miras_megatron.training.checkpoint_folder import folder_of
from miras_megatron.training.main import one_message
from miras_megatron.training.run_folder import stored_form
from miras_megatron.training.tokenizer import JsonTokenizer, Tokenizer

from .hf_config import read_config, run_of_folder
from .hf_import import ImportedWeights
from .hf_tokenizer import CONFIG, FILE, read_tokenizer
from .hf_weights import first_few
from .new_folder import new_folder, refuse_occupied, refuse_small_disk
from .run_writer import write_run

EXAMPLES = """
examples:
  miras-from-hf exported/book runs/imported
  miras-generate runs/imported --prompt "It is a"
  miras-train runs/imported/config.yaml --training.init_from=runs/imported --run.dir=runs/more --data.train=PREFIX
  miras-to-hf runs/imported exported/again            # the same weights, byte for byte
"""


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring for the exit codes."""
    options = _parser().parse_args(argv)
    return one_message("miras-from-hf", lambda: import_folder(options))


def import_folder(options: argparse.Namespace) -> int:
    """Read, check, write. Raises ValueError for what a user can mend."""
    folder, target = Path(options.folder), Path(options.run_dir)
    target = target if target.name else target.absolute()  # "." means another folder to whoever opens the run
    refuse_occupied(target, "RUN_DIR")
    config = read_config(folder)
    run, whole = run_of_folder(folder, config)
    tokenizer = read_tokenizer(folder, options.tokenizer, config)
    weights = ImportedWeights(folder, run)
    run = _placed(run, target, tokenizer)
    refuse_small_disk(target, "RUN_DIR", sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    with new_folder(target, "RUN_DIR", last=folder_of("").name) as made:
        _write(made, run, tokenizer, weights)
    _tell(target, whole, weights)
    return 0


def _placed(run: Run, target: Path, tokenizer: Tokenizer) -> Run:
    """The run as its new folder keeps it: the folders of whoever trained it are left out."""
    name = str(target / FILE) if isinstance(tokenizer, JsonTokenizer) else tokenizer.name
    place, data = replace(run.run, dir=str(target)), replace(run.data, tokenizer=name, cache=None)
    return stored_form(replace(run, run=place, data=data, training=replace(run.training, init_from=None)))


def _write(made: Path, run: Run, tokenizer: Tokenizer, weights: ImportedWeights) -> None:
    """RUN_DIR's files."""
    common = {"step": 0, "tokens": 0, "updates": 0, "tokenizer": tokenizer.digest, "data": {}}
    write_run(made, run, common, weights)
    if isinstance(tokenizer, JsonTokenizer):
        _copy_tokenizer(made, tokenizer)


def _copy_tokenizer(made: Path, tokenizer: JsonTokenizer) -> None:
    """The tokenizer.json, and which token ends a document."""
    shutil.copyfile(tokenizer.name, made / FILE)
    end = {"eos_token": tokenizer.library.id_to_token(tokenizer.eod)}
    write_atomically(made / CONFIG, json.dumps(end, ensure_ascii=False) + "\n")


def _tell(target: Path, whole: bool, weights: ImportedWeights) -> None:
    print(f"wrote {target}: a checkpoint of step 0, weights only")
    if not whole:
        print("  training_config.yaml isn't there: data, training and optimizer in config.yaml have their defaults")
    if not weights.has_padding:
        print("  padding.safetensors isn't there: the rows beyond the vocabulary are zero")
    if weights.widened:
        told = first_few(weights.widened)
        print(f"  narrower there than training has them, and written as training has them: {told}")
    print(f"  start from it with --training.init_from={target}, another --run.dir and your --data.train", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-from-hf",
        description="An exported folder as a run folder with one checkpoint of step 0: weights only.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="what miras-to-hf, or save_pretrained after it, wrote")
    add("run_dir", metavar="RUN_DIR", help="the run folder to write; must not exist, or be empty")
    add("--tokenizer", metavar="PATH", help='"bytes" or a tokenizer.json (default: the one in FOLDER)')
    return parser


if __name__ == "__main__":
    sys.exit(main())
