"""A cluster's YAML file, in configs/clusters or anywhere: found by name or path, and read with every problem told."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from miras_megatron.config.describe import type_in_words
from miras_megatron.config.errors import ConfigError

from .cluster import Cluster, problems_of

FOLDERS = (Path("configs/clusters"), Path(__file__).resolve().parents[2] / "configs/clusters")
"""Where `--cluster NAME` looks: here, then beside this program's sources."""

HINTS: dict[str, Any] = get_type_hints(Cluster)


def load_cluster(name: str) -> tuple[Cluster, str]:
    """The cluster of a name in configs/clusters, or of a path, and the file it came from.

    Raises ConfigError with every problem of the file.
    """
    path = _find(name)
    values = _read(path)
    problems = list(_wrong_fields(values))
    cluster = Cluster(**values) if not problems else None
    problems += list(problems_of(cluster)) if cluster is not None else []
    if cluster is None or problems:
        raise ConfigError(str(path), problems)
    return cluster, str(path)


def known_clusters() -> list[str]:
    """Names that `--cluster` takes here."""
    return sorted({path.stem for folder in FOLDERS for path in folder.glob("*.yaml")})


def _find(name: str) -> Path:
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    for folder in FOLDERS:
        if (path := folder / f"{name}.yaml").is_file():
            return path
    known = known_clusters()
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"--cluster {name}", [f"{hint}no such file in configs/clusters, which has {', '.join(known)}; or give a path"]
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), ["no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"can't be read: {error}"]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: the 32nd of a month
        raise ConfigError(str(path), ["not YAML: " + " ".join(str(error).split())]) from None
    except RecursionError:
        raise ConfigError(str(path), ["can't be read: lists in lists, too deep; no field has more than one"]) from None
    if not isinstance(values or {}, dict):
        raise ConfigError(str(path), [f"must hold fields of a cluster, not {type(values).__name__}"])
    return values or {}


def _wrong_fields(values: Mapping[str, Any]) -> Iterator[str]:
    names = [f.name for f in fields(Cluster)]
    for name, value in values.items():
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
            yield f"{name}: unknown field" + (
                f"; did you mean {close[0]}?" if close else f"; it has {', '.join(names)}"
            )
        elif not _fits(value, HINTS[name]):
            quotes = "; put it in quotes" if isinstance(value, int | float) and _fits("", HINTS[name]) else ""
            yield f"{name} = {value!r}: must be {_in_words(HINTS[name])}{quotes}"


def _in_words(hint: Any) -> str:
    return "names and texts (in quotes)" if get_origin(hint) is dict else type_in_words(hint)


def _fits(value: Any, hint: Any) -> bool:
    """Whether YAML's `value` is of type `hint`; a whole number is a number too, true is none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(x, str) for pair in value.items() for x in pair)
    if inner:
        return any(_fits(value, part) for part in inner)
    if hint is NoneType:
        return value is None
    return isinstance(value, (int, float) if hint is float else hint) and (hint is bool or not isinstance(value, bool))
