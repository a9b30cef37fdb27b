"""From a YAML file and dotted overrides to a `Run`, by jsonargparse over the dataclasses.

An override wins wherever it stands on the command line. Everything a user can get wrong here (a
missing file, an unknown key, a value of another type) is told at once, as `ConfigError`.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from .describe import FieldInfo, dump_run, help_text, list_fields, nested_dataclass, section_types, type_in_words
from .errors import ConfigError
from .overrides import FREE_FORM, PARSER_OPTIONS
from .schema import Run
from .unread import discard_output


@dataclass(frozen=True)
class Command:
    """What a command line asked for."""

    run: Run
    source: str
    """the file it came from, for messages"""
    switches: Mapping[str, bool] = field(default_factory=dict)
    """name -> given"""


def parse_command_line(
    argv: Sequence[str] | None, *, prog: str, description: str, switches: Mapping[str, str] | None = None
) -> Command:
    """`PROG CONFIG [--section.field=value ...] [--switch ...]` -> the run.

    argv      the arguments, None = those of this process
    switches  name -> meaning of further arguments without a value, such as dry-run
    --help and --print_config print and exit with 0. Raises ConfigError.
    """
    words = _split(sys.argv[1:] if argv is None else argv, [*(switches or {}), "help", "h", "print_config"])
    if words.switches & {"help", "h"}:
        _print_and_exit(help_text(prog, description, switches or {}))
    source = words.files[0] if words.files else "the command line"
    problems = [f"{extra}: a second configuration; one run is one file" for extra in words.files[1:]]
    if not words.files and "print_config" not in words.switches:
        problems.append(f"no configuration given; say {prog} CONFIG, such as configs/runs/debug_cpu.yaml")
    values = _read_yaml(words.files[0]) if words.files else {}
    run = _build(source, values, words.overrides, problems + words.problems)
    if "print_config" in words.switches:
        _print_and_exit(dump_run(run).rstrip("\n"))
    return Command(run, source, {name: name in words.switches for name in switches or {}})


def _print_and_exit(text: str) -> NoReturn:
    """Print, and end with 0; a reader that left early, such as `head`, has what it wanted."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()
    raise SystemExit(0)


def load_run(argv: Sequence[str]) -> Run:
    """The run of a file and overrides: ["runs/a/config.yaml", "--model.layers=4"]. Raises ConfigError."""
    return parse_command_line(argv, prog="load_run", description="").run


def load_file(path: Path) -> Run:
    """The run of a file alone, whatever its path: one that begins with "-" is no override. Raises ConfigError."""
    name = os.fspath(path)
    return load_run([os.path.join(os.curdir, name) if name.startswith("-") else name])


@dataclass
class _Words:
    files: list[str]
    overrides: list[tuple[str, str]]
    switches: set[str]
    problems: list[str]


def _split(argv: Sequence[str], switches: Sequence[str]) -> _Words:
    words = _Words([], [], set(), [])
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            words.files.append(word)
        elif name in switches and not equals:
            words.switches.add(name)
        elif equals:
            words.overrides.append((name, value))
        elif rest and not rest[0].startswith("--") and "." in name:
            words.overrides.append((name, rest.pop(0)))
        elif "." in name:
            words.problems.append(f"{name}: no value given; say --{name}=VALUE")
        else:
            words.problems.append(f"{word}: unknown{_nearest(name, [*switches, *_known()], '--')}")
    return words


def _read_yaml(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        twice = list(_given_twice(yaml.compose(text, yaml.SafeLoader)))
        values = yaml.safe_load(text) if not twice else None
    except FileNotFoundError:
        raise ConfigError(name, ["no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(name, [f"can't be read: {error}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError(name, ["not YAML: " + " ".join(str(error).split())]) from None
    if twice:
        raise ConfigError(name, twice)
    if values is not None and not isinstance(values, dict):
        raise ConfigError(name, [f"must hold sections ({', '.join(section_types())}), not {type(values).__name__}"])
    return values or {}


def _given_twice(node: yaml.Node | None, prefix: str = "") -> Iterator[str]:
    """Keys that stand twice in one mapping; YAML's own reader takes the last and says nothing."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _given_twice(item, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in lines:
            yield f"{name}: given twice, in line {lines[name]} and line {line}; keep one"
        lines[name] = line
        yield from _given_twice(value, name + ".")


def _build(
    source: str, values: Mapping[str, Any], overrides: Sequence[tuple[str, str]], problems: Sequence[str]
) -> Run:
    given = {section: fields for section, fields in values.items() if fields is not None}
    words = [f"--{name}={text}" for name, text in overrides]
    found = [*problems, *_name_problems([*_leaves(given), *overrides])]
    parser = _parser()
    try:
        namespace = parser.parse_args(["--config", yaml.safe_dump(given), *words]) if not found else None
    except (ArgumentError, SystemExit):
        namespace = None
    if namespace is None:
        raise ConfigError(source, [*found, *_type_problems(parser, given, overrides)])
    del namespace["config"]
    return Run(**{section: getattr(parser.instantiate(namespace), section) for section in section_types()})


def _name_problems(given: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """Names that are no fields, and null where a field has no null."""
    known = _known()
    for name, value in given:
        if name in section_types():
            yield f"{name} = {value!r}: is a section; set its fields, {name}.FIELD"
        elif name not in known and not name.startswith(FREE_FORM + "."):
            yield f"{name}: unknown field{_nearest(name, known)}; --help lists all"
        elif value is None and NoneType not in get_args(known[name].hint):
            yield f"{name} = null: must be {type_in_words(known[name].hint)}"


def _type_problems(
    parser: ArgumentParser, given: Mapping[str, Any], overrides: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Values of another type; each field is parsed by itself, since the parser stops at the first."""
    leaves = [(name, value, ["--config", yaml.safe_dump(_nested(name, value))]) for name, value in _leaves(given)]
    for name, value, words in [*leaves, *((name, text, [f"--{name}={text}"]) for name, text in overrides)]:
        if name not in _known() or value is None:
            continue
        try:
            parser.parse_args(words)
        except (ArgumentError, SystemExit):
            yield f"{name} = {value!r}: must be {type_in_words(_known()[name].hint)}"


def _nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything that is no section."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if value is None and name in section_types():
            continue
        if isinstance(value, dict) and name != FREE_FORM and _opens(name):
            yield from _leaves(value, name + ".")
        else:
            yield name, value


def _opens(name: str) -> bool:
    info = _known().get(name)
    return info is None or nested_dataclass(info.hint) is not None


@cache
def _known() -> dict[str, FieldInfo]:
    return {info.name: info for info in list_fields()}


def _nearest(name: str, names: Any, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    last = name.rpartition(".")[2]
    close = close or [known for known in names if known.rpartition(".")[2] == last][:1]
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _parser() -> ArgumentParser:
    parser = ArgumentParser(**PARSER_OPTIONS)
    parser.add_argument("--config", action="config")
    for section, cls in section_types().items():
        parser.add_class_arguments(cls, section)
    return parser


__all__ = ["Command", "ConfigError", "dump_run", "load_run", "parse_command_line"]
