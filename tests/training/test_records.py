"""What a run that goes on keeps of its records."""

import json

from miras_megatron.training.records import drop_after


def test_a_record_with_broken_bytes_costs_no_resume(tmp_path):
    """A disk's bad block in one line of the curve must not keep the run from going on."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\xffep": 2}\n' + b"[" * 99_999 + b'\n{"step": 3}\n')
    drop_after(path, 3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 3}]


def test_dropping_from_a_file_that_is_not_there_does_nothing(tmp_path):
    """A new run has no records."""
    drop_after(tmp_path / "none.jsonl", 3)
    assert list(tmp_path.iterdir()) == []
