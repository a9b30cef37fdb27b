"""The tokenizer that goes with a model: the same ids outside as in training."""

import json

import pytest
from miras_tools.hf_tokenizer import END, adds_tokens, byte_file, read_tokenizer, write_tokenizer
from tokenizers import Tokenizer as Library

from miras_megatron.training.tokenizer import ByteTokenizer, load_tokenizer, train_bpe

TEXTS = ["It is a truth", "  two  spaces\n\ttab\r\n", "naïve – 忆 🧠", "\x00\x7f\u0085", "don't 123's"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_bytes_in_tokenizers_words(text):
    """An export whose ids are others than the trained ones writes gibberish."""
    library = Library.from_str(json.dumps(byte_file()))
    ids = library.encode(text).ids
    assert ids == list(text.encode("utf-8"))
    assert library.decode(ids, skip_special_tokens=False) == text
    assert library.token_to_id(END) == ByteTokenizer.eod == library.get_vocab_size() - 1


def test_bytes_come_back_as_bytes(tmp_path):
    """A run from an import must accept data that was cut into bytes: by digest."""
    write_tokenizer(tmp_path, ByteTokenizer())
    assert read_tokenizer(tmp_path, None, {"vocab_size": 257}).digest == ByteTokenizer.digest


@pytest.fixture(scope="module")
def trained_bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    return train_bpe(iter(["the memory keeps the token " * 20]), 270, folder / "tokenizer.json", eod="[STOP]")


def test_a_tokenizer_file_keeps_its_digest(trained_bpe, tmp_path):
    """Also where its end of a document has a name that nobody would guess."""
    write_tokenizer(tmp_path, trained_bpe)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "[STOP]" and config["padding_side"] == "left"
    again = read_tokenizer(tmp_path, None, {"vocab_size": trained_bpe.vocab_size})
    assert (again.digest, again.eod) == (trained_bpe.digest, trained_bpe.eod)


def test_a_tokenizer_of_another_size_is_refused(trained_bpe, tmp_path):
    """Its ids mean other rows of the embedding."""
    write_tokenizer(tmp_path, trained_bpe)
    with pytest.raises(ValueError, match=f"a tokenizer of {trained_bpe.vocab_size} tokens, the model is of 400"):
        read_tokenizer(tmp_path, None, {"vocab_size": 400})
    with pytest.raises(ValueError, match="a tokenizer of 257 tokens"):
        read_tokenizer(tmp_path, "bytes", {"vocab_size": 400})
    assert read_tokenizer(tmp_path, None, {"vocab_size": 400, "tokenizer_size": trained_bpe.vocab_size})


def test_a_folder_without_one_asks_for_it(tmp_path):
    """save_pretrained of a model doesn't write a tokenizer."""
    with pytest.raises(ValueError, match="--tokenizer"):
        read_tokenizer(tmp_path, None, {"vocab_size": 257})
    assert read_tokenizer(tmp_path, "bytes", {"vocab_size": 257}).name == "bytes"


def test_a_tokenizer_nested_without_end_is_refused(tmp_path):
    """A stranger's file must not end in a traceback of Python's own recursion."""
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="tokenizer.json"):
        read_tokenizer(tmp_path, None, {"vocab_size": 257})


def test_a_tokenizer_that_adds_tokens_by_itself_is_known(trained_bpe, tmp_path):
    """Training never saw a [STOP] in front of a text; the model card has to say so."""
    assert not adds_tokens(trained_bpe) and not adds_tokens(ByteTokenizer())
    from tokenizers.processors import TemplateProcessing

    library = Library.from_file(trained_bpe.name)
    library.post_processor = TemplateProcessing(
        single="[STOP] $A", special_tokens=[("[STOP]", library.token_to_id("[STOP]"))]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    assert adds_tokens(load_tokenizer(str(tmp_path / "tokenizer.json"), "[STOP]"))
