"""Session files: whatever a user names by --session gives one message with its path, never a traceback."""

import pytest
import torch

from miras_megatron.training.carried import pack_states
from miras_megatron.training.session import Session

LAYOUT, TENSORS = pack_states({"a": torch.ones(1, 2), "b": [3]})
GOOD = {"format": 1, "model": "m", "layout": LAYOUT, "tensors": TENSORS, "tokens": 4, "pending": [7]}


def test_the_good_one_is_read(tmp_path):
    """What the tests below change."""
    torch.save(GOOD, tmp_path / "s")
    got = Session.load(tmp_path / "s", "m")
    assert (got.tokens, got.pending, got.states["b"]) == (4, (7,), [3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "no session, model missing"),
        ({"format": None, "tokens": None}, "no session, format, tokens missing"),
        ({"format": 2}, "session format 2"),
        ({"layout": 7}, "damaged session"),
        ({"layout": "no json"}, "damaged session"),
        ({"layout": "{}"}, "damaged session.*KeyError"),
        ({"layout": "[" * 99_999}, "damaged session"),
        ({"tensors": {}}, "damaged session.*tensor 0 of 2 is missing"),
        ({"tensors": 5}, "damaged session"),
        ({"tokens": "many"}, "damaged session"),
        ({"pending": 5}, "damaged session"),
    ],
)
def test_a_broken_one_is_refused_by_name(tmp_path, change, message):
    """A KeyError says neither which file nor what to do about it."""
    torch.save({k: v for k, v in (GOOD | change).items() if v is not None}, tmp_path / "s")
    with pytest.raises(ValueError, match=f"{tmp_path / 's'}: {message}"):
        Session.load(tmp_path / "s", "m")


@pytest.mark.parametrize("text", ["Once upon a time\n", "hello", "", "{}", "a: 1\n" * 99])
def test_a_text_file_is_refused_by_name(tmp_path, text):
    """Somebody gives the prompt's file for the session's, and torch's reader says KeyError: 'O'."""
    (tmp_path / "s").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path / 's'}: can't be read as tensors"):
        Session.load(tmp_path / "s", "m")
