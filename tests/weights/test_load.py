"""Files that are no checkpoint are told apart and named."""

from __future__ import annotations

import pytest

from weights import WeightError, load


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "not a checkpoint"),
        (b"hello, world", "not a checkpoint"),
        (b"sys_info\0", "a PyTorch file from before version 0.1.10"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"tjgg\x01\x00\x00\x00", "an old GGML file"),
        (b"<!DOCTYPE html>", "a web page"),
    ],
)
def test_foreign_file_is_named(head, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(head)
    with pytest.raises(WeightError) as caught:
        load(path)
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert "expected a GGUF, safetensors or PyTorch file" in str(caught.value)


def test_pickle_is_refused_and_not_run(tmp_path):
    mark = tmp_path / "ran"
    path = tmp_path / "model.pt"
    path.write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    with pytest.raises(WeightError, match="not a checkpoint"):
        load(path)
    assert not mark.exists()


def test_missing_file_is_named(tmp_path):
    with pytest.raises(WeightError, match="absent.gguf: can't be read: No such file"):
        load(tmp_path / "absent.gguf")
