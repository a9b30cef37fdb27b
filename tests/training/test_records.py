"""What a run that goes on keeps of its records."""

import json

from miras_megatron.training.records import count_events, drop_after


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


def test_events_are_counted_once_however_often_a_cut_run_came_to_them(tmp_path):
    """Two roll backs at one step over other rows are two; the same rows again are a start that was cut."""
    first, again = {"step": 7, "rows": 28, "action": "roll_back"}, {"step": 7, "rows": 36, "action": "roll_back"}
    skipped = {"step": 6, "rows": 24, "action": "skip"}
    lines = [json.dumps(event) for event in (skipped, first, again, skipped, first, again)]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, '{"step": 8, "act', "[" * 99_999]))
    assert count_events(tmp_path / "events.jsonl") == {"roll_back": 2, "skip": 1}


def test_events_of_older_versions_count_once_a_step(tmp_path):
    """They don't say which rows were read; a run that was begun by one goes on with the counts that it had."""
    (tmp_path / "events.jsonl").write_text('{"step": 7, "action": "skip"}\n' * 2 + '{"step": 8, "action": "skip"}\n')
    assert count_events(tmp_path / "events.jsonl") == {"skip": 2}
