"""If this fails, a login node tells other things of missing data than ranks do, or the wrong pair is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from miras_megatron.config.token_pair import find_prefix


def test_a_pair_is_found_as_it_may_be_named(tmp_path: Path) -> None:
    """With or without an ending, and without Megatron's."""
    for ending in (".bin", ".idx"):
        (tmp_path / f"a_text_document{ending}").touch()
    for name in ("a", "a_text_document", "a_text_document.bin", "a_text_document.idx"):
        assert find_prefix(str(tmp_path / name)) == str(tmp_path / "a_text_document")
    with pytest.raises(ValueError, match=r"data.validation = 'nowhere': there is no nowhere.idx"):
        find_prefix("nowhere", "data.validation")
