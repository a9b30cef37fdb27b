"""config.json and generation_config.json of an exported model, from a run's configuration; and back."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import yaml

from miras_megatron.config.check import check_run
from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import load_file
from miras_megatron.config.schema import Data, Memory, Model, Run, Training, flatten
from miras_megatron.model.build import block_spec
from miras_megatron.training.tokenizer import Tokenizer

from .hf_shapes import state_shapes

FORMAT = 1
"""Version of the folder; readers refuse a newer one."""

CONFIG, GENERATION, TRAINING = "config.json", "generation_config.json", "training_config.yaml"

APART = ("rule", "hidden", "heads", "norm_eps", "layers")
"""Fields of BlockSpec that have names of their own in config.json."""

DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""training.precision -> what transformers calls it."""


def write_config(folder: Path, run: Run, tokenizer: Tokenizer) -> None:
    """Write config.json and generation_config.json of `run` to `folder`."""
    _write(folder / CONFIG, model_config(run, tokenizer))
    _write(folder / GENERATION, {**_special_ids(tokenizer), "do_sample": False, "use_cache": True})


def model_config(run: Run, tokenizer: Tokenizer) -> dict[str, Any]:
    """What config.json holds: plain values."""
    model = run.model
    block = {name: value for name, value in asdict(block_spec(run)).items() if name not in APART}
    return {
        "architectures": ["MirasForCausalLM"],
        "model_type": "miras",
        "auto_map": {
            "AutoConfig": "configuration_miras.MirasConfig",
            "AutoModel": "modeling_miras.MirasModel",
            "AutoModelForCausalLM": "modeling_miras.MirasForCausalLM",
        },
        "miras_format": FORMAT,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_width,
        "pattern": model.letters,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "dtype": DTYPE_NAMES[run.training.precision],
        "max_position_embeddings": run.data.sequence_length,
        "rule": {"name": run.memory.rule, "choices": run.memory.choices},
        "block": block,
        "state_shapes": state_shapes(run),
        **_special_ids(tokenizer),
        "tokenizer_size": tokenizer.vocab_size,
        "use_cache": True,
    }


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exported folder. Raises ValueError where it is missing, another model's, or too new."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind, version = config.get("model_type"), int(config.get("miras_format", FORMAT))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"FOLDER = {folder}: {CONFIG} can't be read ({reason}); name what miras-to-hf wrote") from None
    if kind != "miras":
        raise ValueError(f"{path}: model_type = {kind!r}; only exports of miras-to-hf are read (miras)")
    if version > FORMAT:
        raise ValueError(f"{path}: miras_format = {version}, this version reads up to {FORMAT}; update miras-megatron")
    return dict(config)


def run_of_folder(folder: Path, config: dict[str, Any]) -> tuple[Run, bool]:
    """The run that the folder came from, and whether its training configuration was there.

    transformers' save_pretrained leaves training_config.yaml out: what concerns the model is then taken from
    config.json, all else has its default. Raises ValueError where the two files contradict each other.
    """
    path = folder / TRAINING
    told = _run_of_config(folder, config)
    if not path.is_file():
        return told, False
    run = load_file(path)
    _refuse_another_model(path, run, told)
    return replace(run, model=replace(run.model, vocab_size=told.model.vocab_size)), True


def _run_of_config(folder: Path, config: dict[str, Any]) -> Run:
    try:
        block, rule = config["block"], config["rule"]
        model = Model(
            pattern=config["pattern"],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            ffn=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tie_embeddings=config.get("tie_word_embeddings", True),  # transformers 4 leaves its own defaults out
            norm_eps=config["rms_norm_eps"],
            **{f.name: block[f.name] for f in fields(Model) if f.name in block},
        )
        run = Run(
            model=model,
            memory=_memory(rule["name"], rule["choices"], block),
            data=Data(sequence_length=config["max_position_embeddings"]),
            training=Training(seed=block["seed"], precision="bf16" if config.get("dtype") == "bfloat16" else "fp32"),
        )
        run = _read_back(run)
        block_spec(run)
    except ConfigError as error:
        raise ValueError(f"{folder / CONFIG}: describes no model: {'; '.join(error.problems)}") from None
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{folder / CONFIG}: describes no model ({type(error).__name__}: {error})") from None
    return run


def _read_back(run: Run) -> Run:
    """The run as it is read from a file, which is what becomes of it. Raises ValueError for what no file may say."""
    plain = asdict(Run())
    given = {
        section: {name: value for name, value in values.items() if value != plain[section][name]}
        for section, values in asdict(run).items()
    }
    with tempfile.TemporaryDirectory(prefix="miras-config-") as place:
        file = Path(place) / "config.yaml"
        file.write_text(yaml.safe_dump(given), encoding="utf-8")
        again = load_file(file)
    was, now = flatten(run), flatten(again)
    bent = [f"{name} = {was[name]!r}: is read as {value!r}" for name, value in now.items() if was[name] != value]
    bent += ["vocab_size = null: must be a whole number"] if again.model.vocab_size is None else []
    if bent:
        raise ConfigError(CONFIG, bent)
    check_run(again, CONFIG)
    return again


def _memory(rule: str, choices: dict[str, Any], block: dict[str, Any]) -> Memory:
    """The section that gives these choices again: some have fields of their own."""
    own = {f.name for f in fields(Memory)}
    sizes = {name: value for name, value in block.items() if name in own}
    named = {name: value for name, value in choices.items() if name in own}
    options = {name: value for name, value in choices.items() if name not in own}
    return Memory(rule=rule, options=options, **sizes, **named)


def _refuse_another_model(path: Path, run: Run, told: Run) -> None:
    mine, theirs = described(run), described(told)
    differing = [f"{name} is {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]
    if differing:
        raise ValueError(f"{path}: another model than {CONFIG}: {differing[0]}; put back the files of one export")


def described(run: Run) -> dict[str, Any]:
    """All that makes one model another, but for the size of the vocabulary, however its configuration says it."""
    model = {"pattern": run.model.letters, "ffn": run.model.ffn_width, "tie_embeddings": run.model.tie_embeddings}
    return asdict(block_spec(run)) | model


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Documents end with one id, so that it also begins and pads them."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eod)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
