"""miras-generate RUN --prompt TEXT: text from a run's checkpoint, streamed with a state of constant size.

RUN is a run folder (its latest checkpoint) or one checkpoint. With --session FILE the state is taken up from FILE
where it exists and saved there at the end, so that a conversation or a book of any length goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..compat.cpu import core_without_cuda
from ..config.schema import Parallel, Run
from ..model.build import build_model
from ..parallel.mesh import ParallelMesh
from .checkpoint import saved_run
from .checkpoint_folder import find_checkpoint
from .checkpoint_load import load_weights
from .checkpoint_manifest import read_manifest
from .job import Job
from .main import one_message
from .process import settle_process, told_where_memory_is_short
from .session import Session
from .tokenizer import Tokenizer, load_tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 when text was written, 2 for something to mend."""
    options = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    return one_message("miras-generate", lambda: generate(options))


def generate(options: argparse.Namespace) -> int:
    """Write text to standard output. Raises ValueError for what a user can mend."""
    refuse_no_folder(options.session)
    with open_model(Path(options.run)) as opened:
        _write(opened, options)
    return 0


def refuse_no_folder(session: str | None) -> None:
    """Raise ValueError where the session could not be saved, before any text is written."""
    if session is not None and not Path(session).absolute().parent.is_dir():
        raise ValueError(f"--session {session}: there is no folder {Path(session).parent}; make it first")


@dataclass(frozen=True)
class OpenedModel:
    """A trained model ready to read, and what it is called in session files."""

    model: nn.Module
    tokenizer: Tokenizer
    name: str


@contextmanager
def open_model(path: Path, tokenizer: Tokenizer | None = None) -> Iterator[OpenedModel]:
    """The model of a run folder or checkpoint, weights only, whole on this process. Raises ValueError.

    tokenizer   the run's, where it lies elsewhere now than its configuration says
    """
    folder = find_checkpoint(path, "RUN")
    run = replace(saved_run(folder), parallel=Parallel())
    tokenizer = tokenizer or load_tokenizer(tokenizer_of(folder, run))
    with core_without_cuda(), ParallelMesh(run.parallel) as mesh:
        mesh.seed(run.training.seed)
        settle_process(run, mesh)
        with told_where_memory_is_short():
            model = build_model(run, mesh)
        load_weights(Job(run, mesh, tokenizer, model, model.config), folder)
        yield OpenedModel(model.eval(), tokenizer, _name(folder))


def tokenizer_of(checkpoint: Path, run: Run) -> str:
    """What run.data.tokenizer names; where nothing lies there, the one in the run's own folder: imports keep it there,
    and folders are moved."""
    kept = checkpoint.absolute().parent.parent / "tokenizer.json"
    gone = run.data.tokenizer != "bytes" and not Path(run.data.tokenizer).exists()
    return str(kept) if gone and kept.is_file() else run.data.tokenizer


def stream_tokens(
    model: nn.Module,
    session: Session,
    ids: list[int],
    *,
    max_new: int,
    eod: int,
    temperature: float = 0.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Read `ids` after what the session has read, then give out up to `max_new` tokens; `eod` ends it and isn't given.

    temperature  0 takes the likeliest; top_k 0 draws from all of the vocabulary
    The last token given out stays in session.pending: whoever goes on reads it first. The eod isn't read: whoever
    goes on after it goes on in the same document.
    """
    logits = session.read(model, ids)
    for number in range(max_new):
        token = pick(logits[:vocab_size], temperature, top_k, generator)
        if token == eod:
            return
        session.pending = (token,)
        yield token
        if number + 1 < max_new:
            logits = session.read(model, [])


def pick(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> int:
    """One token from logits [vocab]."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits = logits.cpu().double() / temperature
    if top_k:
        kept = logits.topk(min(top_k, len(logits)))
        return int(kept.indices[torch.multinomial(kept.values.softmax(0), 1, generator=generator)])
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


def _write(opened: OpenedModel, options: argparse.Namespace) -> None:
    tokenizer, file = opened.tokenizer, options.session
    known = file is not None and Path(file).exists()
    device = next(opened.model.parameters()).device
    session = Session.load(file, opened.name, device) if known else Session()
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    # Documents begin with their first token in training; only where there is none does the end of another stand in.
    ids = tokenizer.encode(prompt) or ([] if known else [tokenizer.eod])
    tokens = stream_tokens(
        opened.model,
        session,
        ids,
        max_new=options.max_new,
        eod=tokenizer.eod,
        temperature=options.temperature,
        top_k=options.top_k,
        generator=torch.Generator().manual_seed(options.seed),
        vocab_size=tokenizer.vocab_size,
    )
    decoder = tokenizer.stream()
    for token in tokens:
        print(decoder.push(token), end="", flush=True)
    print(decoder.finish(), flush=True)
    if file is not None:
        session.save(file, opened.name)


def _name(folder: Path) -> str:
    """What a session file calls the model: step, and the digest of the weights' files."""
    manifest = read_manifest(folder)
    digests = "".join(entry["sha256"] for name, entry in manifest["files"].items() if name.startswith("__"))
    return f"{folder.name} {hash_text(digests)}"


def hash_text(text: str) -> str:
    """A short SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="miras-generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="a run folder or one of its checkpoints")
    parser.add_argument(
        "--prompt", default="", help='text to go on from; "-" reads it from standard input (default: none)'
    )
    parser.add_argument(
        "--max-new", type=_at_least(0), default=200, metavar="N", help="tokens to write at most (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.8,
        help="0 always takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top-k",
        type=_at_least(0),
        default=0,
        metavar="K",
        help="draw from the K likeliest; 0 = from all (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default: %(default)s)")
    parser.add_argument(
        "--session", metavar="FILE", help="take up the state from FILE, and save it there (default: no file)"
    )
    return parser


def _at_least(least: int) -> type[int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: must be at least {least}")
        return value

    return number  # type: ignore[return-value]


def _temperature(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of at least 0")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
