"""miras-ds-convert to-universal | to-deepspeed CHECKPOINT FOLDER, and from-deepspeed FOLDER RUN_DIR.

Between the project's checkpoint, which runs of every engine read and write, and DeepSpeed's: its universal one, and its
own, which is written by ranks and read by as many of the same stage. Exit code 0: written; 2: bad input, said in one
message, nothing written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from miras_megatron.config.schema import Optimizer, Parallel, Run
from miras_megatron.training.checkpoint import saved_run
from miras_megatron.training.checkpoint_folder import find_checkpoint, folder_of
from miras_megatron.training.checkpoint_manifest import damaged_files, refuse_damaged
from miras_megatron.training.main import one_message
from miras_megatron.training.run_folder import stored_form

from .ds_common import read_common
from .ds_universal import BESIDE, TRUST, UniversalTensors, keep_beside, write_universal
from .new_folder import new_folder
from .run_writer import write_run

EXAMPLES = """
examples:
  miras-ds-convert to-universal runs/mine universal
  miras-ds-convert to-deepspeed runs/mine own --zero 2
  miras-ds-convert from-deepspeed universal runs/again
  miras-ds-convert from-deepspeed own runs/again --trust-pickle
  miras-train runs/again/config.yaml --run.dir=runs/again     # goes on from there
"""


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring for the exit codes."""
    options = _parser().parse_args(argv)
    return one_message("miras-ds-convert", lambda: COMMANDS[options.command](options))


def to_universal(options: argparse.Namespace) -> int:
    """The project's checkpoint as a universal one."""
    checkpoint, target = _undamaged(options.source, "CHECKPOINT"), Path(options.target)
    common = read_common(checkpoint)
    with new_folder(target, "FOLDER", last=BESIDE) as made:
        write_universal(checkpoint, common["updates"], made)
    print(f"wrote {target}: DeepSpeed's universal checkpoint of step {common['step']}", flush=True)
    return 0


def _undamaged(path: str, field: str) -> Path:
    """The checkpoint that a user named, after its files were compared with its manifest. Raises ValueError."""
    checkpoint = find_checkpoint(path, field)
    refuse_damaged(checkpoint, damaged_files(checkpoint))
    return checkpoint


def to_deepspeed(options: argparse.Namespace) -> int:
    """The project's checkpoint as DeepSpeed's own, of one rank; this process loads the whole model."""
    from miras_megatron.compat.cpu import core_without_cuda
    from miras_megatron.parallel.mesh import ParallelMesh
    from miras_megatron.training.build_job import build_job
    from miras_megatron.training.tokenizer import with_vocabulary

    checkpoint, target = find_checkpoint(options.source, "CHECKPOINT"), Path(options.target)
    run = _alone(saved_run(checkpoint), options.zero)
    with new_folder(target, "FOLDER", last=BESIDE) as made, core_without_cuda(), ParallelMesh(run.parallel) as mesh:
        from miras_megatron.training.checkpoint_load import load_checkpoint

        with closing(build_job(with_vocabulary(run), mesh)) as job:
            progress = load_checkpoint(job, checkpoint)
            engine: Any = job.engine
            engine.zero.save_own(made, f"step_{progress.step}", progress.step)
        keep_beside(checkpoint, made)
    print(
        f"wrote {target}: DeepSpeed's own checkpoint of step {progress.step}, ZeRO {options.zero}, one rank", flush=True
    )
    return 0


def _alone(run: Run, stage: int) -> Run:
    optimizer: Optimizer = replace(run.optimizer, engine="deepspeed", zero=stage, distributed=False)
    return replace(run, parallel=Parallel(), optimizer=optimizer)


def from_deepspeed(options: argparse.Namespace) -> int:
    """A universal checkpoint, or DeepSpeed's own, as a run folder with one checkpoint of the project."""
    source, target = Path(options.source), Path(options.target)
    beside = source / BESIDE if options.like is None else _undamaged(options.like, "--like")
    if not (beside / "config.yaml").is_file():
        raise ValueError(f"FOLDER = {source}: has no {BESIDE}/config.yaml; name a run of the same model with --like")
    run, common = saved_run(beside), read_common(beside)
    with tempfile.TemporaryDirectory() as room, new_folder(target, "RUN_DIR", last=folder_of("").name) as made:
        tensors = UniversalTensors(_universal(source, options.trust_pickle, Path(room)), run, options.trust_pickle)
        updates = tensors.updates
        placed = stored_form(replace(run, run=replace(run.run, dir=str(target))))
        write_run(made, placed, common | ({} if updates is None else {"updates": updates}), tensors)
    print(f"wrote {target}: a checkpoint of step {common['step']}", flush=True)
    return 0


def _universal(source: Path, trusted: bool, room: Path) -> Path:
    """`source`, or what DeepSpeed's converter makes of its own checkpoint there."""
    if (source / "zero").is_dir():
        return source
    own = sorted({path.parent for path in source.glob("**/*_optim_states.pt")})
    if not own:
        raise ValueError(
            f"FOLDER = {source}: neither a universal checkpoint (zero/) nor DeepSpeed's own (*_optim_states.pt)"
        )
    if not trusted:
        raise ValueError(f"FOLDER = {source}: DeepSpeed's own checkpoint is made of pickled objects; {TRUST}")
    from miras_megatron.parallel.zero import make_universal

    make_universal(_latest(source, own), room / "universal")
    return room / "universal"


def _latest(source: Path, own: list[Path]) -> Path:
    """The one of several checkpoints that DeepSpeed's `latest` names. Raises ValueError where none says which."""
    if len(own) == 1:
        return own[0]
    with suppress(OSError, UnicodeDecodeError):
        named = source / (source / "latest").read_text(encoding="utf-8").strip()
        if named in own:
            return named
    names = ", ".join(path.name for path in own)
    raise ValueError(f"FOLDER = {source}: holds {names}, and no `latest` that names one of them; name one's folder")


COMMANDS = {"to-universal": to_universal, "to-deepspeed": to_deepspeed, "from-deepspeed": from_deepspeed}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-ds-convert",
        description="Between the project's checkpoints and DeepSpeed's.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, work in COMMANDS.items():
        add = commands.add_parser(name, help=(work.__doc__ or "").rstrip(".")).add_argument
        back = name == "from-deepspeed"
        add("source", metavar="FOLDER" if back else "CHECKPOINT", help="what to read")
        add("target", metavar="RUN_DIR" if back else "FOLDER", help="the folder to write; must not exist, or be empty")
        if back:
            add(
                "--like",
                metavar="RUN",
                help="a run or checkpoint of the same model, where FOLDER isn't of this project",
            )
            add(
                "--trust-pickle",
                action="store_true",
                help="unpickle files that hold objects, which runs what is in them",
            )
        if name == "to-deepspeed":
            add("--zero", type=int, default=2, choices=(1, 2, 3), help="its stage (default 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
