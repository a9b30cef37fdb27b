"""States that outlive a step: each lane goes on from its own, and from the right rows of a batch."""

import json

import pytest
import torch

from miras_megatron.memory import MemoryState
from miras_megatron.training.batch import Batch
from miras_megatron.training.carried import CarriedStates, join_rows, pack_states, take_rows, unpack_states


def state_of(*values):
    """A pytree such as a block's, one row a value."""
    rows = torch.tensor(values)
    memory = MemoryState((rows[:, None],), (), (rows[:, None],), torch.arange(len(values)))
    return {1: {"memory": memory, "tail": rows[:, None, None]}, 2: None}


def batch_of(lanes, reset):
    lanes, reset = torch.tensor(lanes), torch.tensor(reset)
    rows = torch.zeros(len(lanes), 3, dtype=torch.int64)
    return Batch(rows, rows, rows.float(), None, reset, lanes, lanes)


def test_rows_go_on_from_their_own_lane():
    """Lanes come in any order, and rows that begin a document are apart."""
    carried = CarriedStates()
    carried.keep([3, 5, 4], state_of(0.3, 0.5, 0.4))
    (fresh, nothing), (going_on, states) = carried.groups(batch_of([5, 3, 4], [False, True, False]))
    assert (fresh, nothing, going_on) == ([1], None, [0, 2])
    assert states[1]["tail"].flatten().tolist() == [0.5, 0.4000000059604645]
    assert states[1]["memory"].weights[0].flatten().tolist() == [0.5, 0.4000000059604645]


def test_kept_states_are_cut_from_the_graph_and_their_own():
    """A graph over all steps would grow for ever; a view would change under the next step."""
    carried = CarriedStates()
    x = torch.ones(2, 4, requires_grad=True)
    y = x * 2
    carried.keep([0, 1], {1: y})
    assert not carried.lanes[0][1].requires_grad
    with torch.no_grad():
        y += 1
    assert carried.lanes[0][1].tolist() == [[2.0] * 4]


def test_a_lane_without_its_state_starts_afresh_and_says_so(caplog):
    """After a skipped step; silence would hide a checkpoint that lost its states."""
    ((fresh, states),) = CarriedStates().groups(batch_of([7], [False]))
    assert (fresh, states) == ([0], None)
    assert "lanes [7] go on inside a document without their state" in caplog.text


def test_packing_a_state_keeps_everything():
    """Checkpoints and sessions store tensors and a line of JSON, and get the same tree back."""
    state = state_of(0.1, 0.2) | {3: {"count": 4, "empty": ()}}
    layout, tensors = pack_states(state)
    again = unpack_states(layout, {name: x.clone() for name, x in tensors.items()})
    assert isinstance(again[1]["memory"], MemoryState)
    assert again[2] is None and again[3] == {"count": 4, "empty": ()}
    assert torch.equal(again[1]["memory"].phase, torch.arange(2))
    joined = join_rows([take_rows(state, 0, 1), take_rows(state, 1, 2)])
    assert torch.equal(joined[1]["tail"], state[1]["tail"])


FACTORY = {"default_factory_module": "antigravity", "default_factory_name": "fly", "dict_context": "[]"}
ENUM = json.dumps([{"__enum__": True, "fqn": "antigravity:Fly", "name": "x"}])


@pytest.mark.parametrize(
    ("kind", "context"), [("collections.defaultdict", FACTORY), ("builtins.dict", ENUM)], ids=["factory", "enum"]
)
def test_a_layout_that_names_modules_is_refused(kind, context):
    """torch imports what these nodes name: a stranger's session or checkpoint could run code by it."""
    spec = json.dumps([1, {"type": kind, "context": context, "children_spec": []}])
    with pytest.raises(ValueError, match="states hold only"):
        unpack_states(json.dumps({"spec": spec, "plain": {}, "leaves": 0}), {})
