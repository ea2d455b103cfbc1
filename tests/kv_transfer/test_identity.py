import os

import pytest

from banyan.base.errors import ModelError
from banyan.kv_transfer.store import digest_of_files, identity


def test_any_fact_that_differs_makes_another_identity():
    seen = {identity(facts) for facts in ((), ("a",), ("a", 1), ("a", "1"), ("a1",), (("a", 1),))}
    assert len(seen) == 6 and all(len(found) == 32 for found in seen)
    assert identity(("a", 1)) == identity(["a", 1])


def test_one_byte_of_the_weights_makes_another_digest(tmp_path):
    files, notes = [tmp_path / "a", tmp_path / "b"], tmp_path / "notes"
    content = bytearray(os.urandom(70 << 20))
    files[0].write_bytes(content)
    files[1].write_bytes(b"second")
    first = digest_of_files(files, notes)
    assert digest_of_files(files, tmp_path / "empty") == first
    assert digest_of_files(files[::-1], notes) != first
    content[-5] ^= 1
    files[0].write_bytes(content)
    assert digest_of_files(files, notes) != first


def test_files_that_have_not_changed_are_not_read_again(tmp_path, monkeypatch):
    file, notes = tmp_path / "a", tmp_path / "notes"
    file.write_bytes(b"weights")
    first = digest_of_files([file], notes)
    monkeypatch.setattr("banyan.kv_transfer.store._hash", lambda file: 1 / 0)
    assert digest_of_files([file], notes) == first


def test_notes_that_cannot_be_used_do_no_harm(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"weights")
    assert len(digest_of_files([file], file / "nowhere")) == 32
    notes = tmp_path / "notes"
    first = digest_of_files([file], notes)
    for note in notes.iterdir():
        note.write_text("rubbish")
    assert digest_of_files([file], notes) == first


def test_weights_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ModelError, match="gone"):
        digest_of_files([tmp_path / "gone"], tmp_path)
