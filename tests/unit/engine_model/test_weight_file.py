"""Tensors in one file: what is read is what was written, aligned, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.loading.weight_file import ALIGNMENT, read_weights, write_weights

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7).bfloat16(),
    "empty": torch.empty(0, 4),
    "c.packed": torch.arange(200, dtype=torch.uint8),
    "d": torch.randn(4, 6).t(),
}


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_read_is_what_was_written(tmp_path: Path, mapped: bool) -> None:
    write_weights(tmp_path, "x", TENSORS)
    found = read_weights(tmp_path, "x", mapped=mapped)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % ALIGNMENT == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.json"]


@pytest.mark.parametrize("mapped", [False, True])
def test_nothing_at_all(tmp_path: Path, mapped: bool) -> None:
    write_weights(tmp_path, "x", {})
    assert read_weights(tmp_path, "x", mapped=mapped) == {}


def test_a_mapped_file_is_not_changed_by_who_writes_to_a_tensor(tmp_path: Path) -> None:
    write_weights(tmp_path, "x", TENSORS)
    read_weights(tmp_path, "x", mapped=True)["a"].zero_()
    assert torch.equal(read_weights(tmp_path, "x", mapped=True)["a"], TENSORS["a"])


def test_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor a: int64 is not served"):
        write_weights(tmp_path, "x", {"a": torch.zeros(1, dtype=torch.int64)})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        read_weights(tmp_path, "x", mapped=False)
    write_weights(tmp_path, "x", TENSORS)
    (tmp_path / "x.bin").chmod(0o622)
    with pytest.raises(PermissionError, match="can be written by others"):
        read_weights(tmp_path, "x", mapped=True)


@pytest.mark.parametrize(
    "place", ['"offset": 1, "size": 60', '"offset": 64, "size": 6400', '"offset": -64, "size": 60', '"size": 60']
)
def test_places_outside_the_file_are_refused(tmp_path: Path, place: str) -> None:
    write_weights(tmp_path, "x", {"a": torch.zeros(15)})
    (tmp_path / "x.json").write_text(
        f'{{"total": 64, "tensors": [{{"name": "a", "dtype": "float32", "shape": [15], {place}}}]}}'
    )
    for mapped in (False, True):
        with pytest.raises(ValueError, match="a"):
            read_weights(tmp_path, "x", mapped=mapped)
