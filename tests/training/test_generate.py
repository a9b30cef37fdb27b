"""Generation: a state of constant size says what the full forward pass over the whole text says."""

import pytest
import torch

from miras_megatron.training.generate import open_model, stream_tokens
from miras_megatron.training.session import Session

TEXT = [*b"the memory keeps a token and is surprised by the next one, which it keeps too."]


@pytest.fixture(scope="module")
def opened(trained_run):
    with open_model(trained_run) as opened:
        yield opened


def full_logits(model, ids):
    """[T, vocab] float32 of one pass over all of `ids`."""
    with torch.inference_mode():
        return model(torch.tensor([ids]))[0].float()


def test_the_stream_says_at_every_token_what_the_full_pass_says(opened):
    """Training and decoding are the same function: what many published memories fail at."""
    want = full_logits(opened.model, TEXT)
    session = Session()
    got = torch.stack([session.read(opened.model, [token]) for token in TEXT])
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("cut", [1, 7, 8, 63, 100])
def test_a_prompt_may_be_read_in_any_cuts(opened, cut):
    """Long prompts are read in pieces, and pieces end inside chunks and segments."""
    session = Session()
    got = session.read(opened.model, TEXT, cut=cut)
    assert session.tokens == len(TEXT)
    assert torch.allclose(got, full_logits(opened.model, TEXT)[-1], atol=1e-5)


def test_greedy_text_is_that_of_the_full_pass(opened):
    """Token by token, each from the state alone, against a full pass over all that was written so far."""
    ids = TEXT[:9]
    for token in stream_tokens(opened.model, Session(), ids, max_new=20, eod=-1):
        assert token == int(full_logits(opened.model, ids)[-1].argmax())
        ids = [*ids, token]
    assert len(ids) == 29


def test_the_state_is_of_constant_size(opened):
    """The promise of a memory: bytes don't hang on the length of the text."""
    session = Session()
    sizes = []
    for token in TEXT:
        session.read(opened.model, [token])
        sizes.append(session.state_bytes)
    assert max(sizes[8:]) == min(sizes[8:])


def test_a_session_goes_on_where_it_stopped(opened, tmp_path):
    """Saved, loaded and gone on from, also between two tokens of one chunk; drawing goes on likewise."""
    whole = list(stream_tokens(opened.model, Session(), TEXT[:11], max_new=12, eod=-1))
    session = Session()
    first = list(stream_tokens(opened.model, session, TEXT[:11], max_new=5, eod=-1))
    session.save(tmp_path / "s", opened.name)
    again = Session.load(tmp_path / "s", opened.name)
    assert again.pending == (first[-1],)
    assert first + list(stream_tokens(opened.model, again, [], max_new=7, eod=-1)) == whole


def test_a_session_of_another_checkpoint_is_refused(opened, tmp_path):
    """Its state means nothing to other weights; and a file that is no session is said to be none."""
    session = Session()
    session.read(opened.model, TEXT)
    session.save(tmp_path / "s", "step_00000001 other")
    with pytest.raises(ValueError, match="a session of step_00000001 other, not of step_00000006"):
        Session.load(tmp_path / "s", opened.name)
    (tmp_path / "s").write_bytes(b"no session")
    with pytest.raises(ValueError, match="can't be read"):
        Session.load(tmp_path / "s", opened.name)
