"""Single fields of a run set anew, without reading the whole of it again: the points of a sweep differ in few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from .describe import list_fields, section_types
from .schema import Run

FREE_FORM = "memory.options"
"""The one field whose keys are not fields of ours: they are keywords of make_rule."""

PARSER_OPTIONS: dict[str, Any] = {"exit_on_error": False, "default_env": False}
"""Errors are raised, and no variable of the environment sets a field."""


def with_fields(run: Run, given: Mapping[str, str]) -> Run | None:
    """`run` with fields as a command line would set them, after all it said before; None where it would refuse them.

    given  dotted name -> text, such as optimizer.lr -> 1e-3
    None has no reason: parse_command_line of the same words tells every problem.
    """
    sections = {name.partition(".")[0] for name in given}
    if not all(name in _names() or name.startswith(FREE_FORM + ".") for name in given):
        return None
    try:
        changed = {section: _with_fields(getattr(run, section), section, given) for section in sections}
    except (ArgumentError, SystemExit):
        return None
    return replace(run, **changed)


def _with_fields(values: Any, section: str, given: Mapping[str, str]) -> Any:
    words = [f"--{name}={text}" for name, text in given.items() if name.startswith(section + ".")]
    parser = _section_parser(section)
    namespace = parser.parse_args(["--config", yaml.safe_dump({section: asdict(values)}), *words])
    del namespace["config"]
    return getattr(parser.instantiate(namespace), section)


@cache
def _section_parser(section: str) -> ArgumentParser:
    """To make one takes as long as to parse ten points."""
    parser = ArgumentParser(**PARSER_OPTIONS)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(section_types()[section], section)
    return parser


@cache
def _names() -> frozenset[str]:
    return frozenset(info.name for info in list_fields())
