"""The fields of a run for people: docstrings, types in words, help, a commented YAML file."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from .schema import Run

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}


@dataclass(frozen=True)
class FieldInfo:
    """One field of the configuration."""

    name: str
    """dotted, model.hidden"""
    hint: Any
    """its type"""
    default: Any
    """what it is where nobody says"""
    doc: str
    """one line with its unit"""


@cache
def docstrings(cls: type) -> dict[str, str]:
    """Field -> the docstring line under it, read from the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for item, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                docs[item.target.id] = " ".join(text.split())
    return docs


@cache
def section_types(cls: type = Run) -> dict[str, type]:
    """Section name -> its dataclass."""
    return {name: hint for name, hint in get_type_hints(cls).items() if isinstance(hint, type) and is_dataclass(hint)}


def nested_dataclass(hint: Any) -> type | None:
    """The dataclass inside `X` or `X | None`, or None."""
    for part in get_args(hint) or (hint,):
        if isinstance(part, type) and is_dataclass(part):
            return part
    return None


def default_of(f: Field[Any]) -> Any:
    """The default of a dataclass field."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def list_fields(cls: type = Run, prefix: str = "") -> Iterator[FieldInfo]:
    """Every field, sections opened, optional sections both themselves and opened."""
    hints, docs = get_type_hints(cls), docstrings(cls)
    for f in fields(cls):
        inner, name = nested_dataclass(hints[f.name]), prefix + f.name
        if inner is None or inner is not hints[f.name]:
            yield FieldInfo(name, hints[f.name], default_of(f), docs.get(f.name, ""))
        if inner is not None:
            yield from list_fields(inner, name + ".")


def type_in_words(hint: Any) -> str:
    """A type as a user would say it."""
    if hint in WORDS:
        return WORDS[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin in (Union, UnionType):
        return " or ".join(type_in_words(a) for a in args)
    if origin is list:
        return "a list, each " + type_in_words(args[0])
    inner = nested_dataclass(hint)
    return f"a section with {', '.join(f.name for f in fields(inner))}" if inner else "a mapping"


def help_text(prog: str, description: str, switches: Mapping[str, str]) -> str:
    """What --help prints: usage, switches, and every field with type, default and meaning.

    A description that opens with `prog` and what may follow it says the usage itself.
    """
    usage = [] if description.startswith(f"{prog} ") else [f"{prog} CONFIG [--section.field=value ...]", ""]
    lines = ["usage: " + "\n".join([*usage, description]), "", "switches:"]
    shown = {"help": "prints this", "print_config": "prints the whole resolved configuration as YAML"} | dict(switches)
    lines += [f"  --{name:<14} {text}" for name, text in shown.items()]
    lines += ["", "fields (in CONFIG as YAML sections; here as overrides, which win wherever they stand):"]
    for info in list_fields():
        if nested_dataclass(info.hint) is None:
            lines.append(f"  --{info.name}=VALUE")
            about = f"{info.doc} ({type_in_words(info.hint)}; default {_inline(info.default)})"
            lines += textwrap.wrap(about, 100, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def dump_run(run: Run, *, comments: bool = True) -> str:
    """The complete run as YAML, a section after the other, the meaning of each field above it."""
    lines = []
    for section, cls in section_types().items():
        docs, values = docstrings(cls), asdict(getattr(run, section))
        lines.append(f"{section}:")
        for f in fields(cls):
            if comments:
                lines.append(f"  # {docs[f.name]}")
            lines.append(_field_yaml(f.name, values[f.name]))
    return "\n".join(lines) + "\n"


_FIELD_YAML: dict[tuple[str, str], str] = {}
"""(field, its value as repr, which tells 1 from 1.0 and true) -> its lines."""


def _field_yaml(name: str, value: Any) -> str:
    """Its lines in a section; made once for each value, since the hundreds of runs of a sweep differ in few."""
    known = name, repr(value)
    if known not in _FIELD_YAML:
        _FIELD_YAML[known] = textwrap.indent(_plain_yaml({name: value}), "  ")
    return _FIELD_YAML[known]


def _plain_yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10_000).rstrip()


def _inline(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    return text.removesuffix("\n...").strip()
