"""If these fail, a run that can't work starts, holds its GPUs for a while and dies with somebody else's message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from miras_megatron.config.check import check_run, find_problems, find_warnings
from miras_megatron.config.errors import ConfigError
from miras_megatron.config.schema import Model, Needles, Run, flatten

GOOD = Run(model=Model(block="mac"))


def change(**fields: Any) -> Run:
    """GOOD with section__field=value changed."""
    run = GOOD
    for name, value in fields.items():
        section, field = name.split("__")
        run = replace(run, **{section: replace(getattr(run, section), **{field: value})})
    return run


def test_a_good_run_has_no_problems() -> None:
    """Otherwise nobody trains anything."""
    check_run(GOOD, "run.yaml")
    assert list(find_warnings(change(memory__lr_max=1e-6))) == []


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"optimizer__lr": float("inf")}, "optimizer.lr = inf: must be a finite number"),
        ({"training__seed": 2**63 - 1}, "training.seed = 9223372036854775807: must be at most 8796093022208 (each"),
        ({"data__seed": 2**63}, "data.seed = 9223372036854775808: must be at most 9223372036854775807"),
        ({"training__steps": 10**23}, "training.steps = 100000000000000000000000: must be at most 99999999 (checkp"),
        ({"data__workers": 10**8}, "data.workers = 100000000: must be at most 1024 (each is a thread"),
        ({"parallel__timeout": 1e18}, "parallel.timeout = 1e+18: must be at most 10000000 (seconds"),
        ({"run__dir": ""}, "run.dir = '': must name a folder, such as runs/mine"),
        ({"run__dir": "a\0b"}, r"run.dir = 'a\x00b': must name a folder"),
        ({"memory__options": {"name": "x"}}, "memory.options.name: has a field of its own; set memory.rule"),
        (
            {"model__block": "mal", "model__layers": 3},
            "model.layers = 3: not a multiple of the 2 letters of 'mw'; nearest 2",
        ),
        (
            {"model__pattern": "mw"},
            "model.block = 'mac' and model.pattern = 'mw': one is shorthand for the other; give one, and take "
            "the other out with --model.block=null",
        ),
        ({"model__block": None}, "model.block = null and model.pattern = null: give one"),
        ({"model__block": None, "model__pattern": "mx"}, "model.pattern = 'mx': unknown letter x"),
        (
            {"model__hidden": 130, "model__heads": 4},
            "model.hidden = 130: not divisible by model.heads = 4; nearest 128",
        ),
        ({"model__hidden": 126, "model__heads": 6}, "model.heads = 6: heads of 21 channels; rotary positions need"),
        ({"parallel__tensor": 3}, "parallel.tensor = 3: model.heads = 2 is not divisible by it"),
        ({"parallel__pipeline": 4}, "parallel.pipeline = 4: model.layers = 2 is not divisible by it"),
        ({"parallel__sequence": True}, "parallel.sequence = true: only with parallel.tensor above 1; set false"),
        ({"parallel__tensor": 2}, "parallel.tensor x pipeline x context = 2: this job has 1 rank,"),
        ({"training__global_batch": 9, "training__micro_batch": 2}, "training.global_batch = 9: not a multiple of"),
        ({"memory__rule": "titan"}, "memory.rule = 'titan': unknown; the named rules are titans, titans_linear"),
        ({"memory__depth": 5}, "memory.depth = 5: a memory has 1 to 4 matrices"),
        (
            {"memory__options": {"momentum": False}},
            "memory.options.momentum: has a field of its own; set memory.momentum",
        ),
        (
            {"memory__options": {"link": "exact_link"}},
            "memory.options.link = 'exact_link': no effect with retention = 'decay'",
        ),
        ({"memory__rule": "memora", "memory__momentum": True}, "memory.momentum = True with retention = 'kl': "),
        ({"memory__options": {"dept": 2}}, "memory.options.dept: unknown choice; did you mean depth?"),
        ({"memory__options": {"window": 1.5}}, "memory.options.window = 1.5: must be a whole number"),
        (
            {"memory__rule": "titans_linear", "memory__options": {"gate_side": "columns"}},
            "memory.options.gate_side = 'columns': no effect with memory.gates = 'head'",
        ),
        ({"memory__lr_init": 1.0}, "memory.lr_init = 1.0: must be between 0 and 1"),
        ({"memory__horizon_spread": 0.5}, "memory.horizon_spread = 0.5: must be at least 1"),
        ({"memory__horizon": 0.0}, "memory.horizon = 0.0: must be above 0, or null"),
        *(
            ({"data__split": text}, f"data.split = {text!r}: must be three shares of at least 0 such as")
            for text in ("1,2,x", "nan,1,1", "inf,1,1", "1e308,1e308", "", "0,0,0", "1,2,3,4")
        ),
        *(
            ({"data__train": [f"{weight} a"]}, f"data.train = ['{weight} a']: entry '{weight} a'")
            for weight in ("0", "nan", "inf", "-1")
        ),
        ({"data__train": ["1e308 a", "1e308 b"]}, "data.train = ['1e308 a', '1e308 b']: weights add up to"),
        ({"data__needles": Needles(alphabet="00")}, "data.needles.alphabet = '00'"),
        ({"data__needles": Needles(per_row=99)}, "data.needles.per_row = 99: needles and questions take 792 tokens"),
        (
            {"data__needles": Needles(), "data__tokenizer": "t.json"},
            "data.tokenizer = 't.json': data.needles are planted",
        ),
        ({"optimizer__min_lr": 1.0}, "optimizer.min_lr = 1.0: above optimizer.lr = 0.001"),
        ({"training__steps": 0}, "training.steps = 0: must be above 0"),
    ],
)
def test_each_problem_is_named_with_its_way_out(fields: dict[str, Any], line: str) -> None:
    """Field, value, rule, way out."""
    found = list(find_problems(change(**fields)))
    assert any(problem.startswith(line) for problem in found), found


def test_all_problems_come_at_once_in_the_house_form() -> None:
    """The form the documentation shows."""
    run = change(parallel__tensor=3, parallel__context=3, optimizer__clip=-1.0)
    with pytest.raises(ConfigError) as caught:
        check_run(run, "configs/runs/x.yaml", world_size=6)
    first, *rest = str(caught.value).splitlines()
    assert first == f"{len(rest)} problems in configs/runs/x.yaml"
    assert len(rest) >= 4 and all(line.startswith("  ") for line in rest)


def test_a_job_of_several_ranks() -> None:
    """The same file is right on one count of ranks and wrong on another."""
    run = change(parallel__tensor=2, training__global_batch=12)
    assert list(find_problems(run, world_size=8)) == []
    assert [p.partition(":")[0] for p in find_problems(run, world_size=10)] == ["training.global_batch = 12"]
    assert [p.partition(":")[0] for p in find_problems(run, world_size=3)] == [
        "parallel.tensor x pipeline x context = 2"
    ]


def test_no_value_breaks_the_check_itself() -> None:
    """A check that divides by what it should refuse gives a traceback instead of a message."""
    for name, value in flatten(GOOD).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            for wrong in (0, -1):
                list(find_problems(change(**{name.replace(".", "__"): type(value)(wrong)}), world_size=4))


def test_warnings_name_what_will_disappoint() -> None:
    """These run, so they are no errors, but a user should have read them."""
    run = change(memory__lr_max=0.1, memory__chunk_size=512, memory__horizon=10.0, optimizer__warmup_steps=101)
    named = [warning.split(" ")[0] for warning in find_warnings(run)]
    assert named == ["optimizer.warmup_steps", "memory.lr_max", "memory.chunk_size", "memory.horizon"]
    assert list(find_warnings(replace(change(memory__lr_max=0.1), model=Model(block="attention")))) == []
