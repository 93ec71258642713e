"""The same array in every format."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from isoscale.errors import UserError

Spec = dict[str, object]


def write_npy(folder: Path, array: np.ndarray) -> Spec:
    np.save(folder / "a.npy", array)
    return {"path": str(folder / "a.npy")}


def write_npz(folder: Path, array: np.ndarray) -> Spec:
    np.savez(folder / "a.npz", other=np.zeros(3), x=array)
    return {"path": str(folder / "a.npz"), "dataset": "x"}


def write_compressed_npz(folder: Path, array: np.ndarray) -> Spec:
    np.savez_compressed(folder / "a.npz", other=np.zeros(3), x=array)
    return {"path": str(folder / "a.npz"), "dataset": "x"}


def write_plain_hdf5(folder: Path, array: np.ndarray) -> Spec:
    with h5py.File(folder / "a.h5", "w", userblock_size=512) as file:
        file["other"], file["group/x"] = np.zeros(3), array
    return {"path": str(folder / "a.h5"), "dataset": "group/x"}


def write_chunked_hdf5(folder: Path, array: np.ndarray) -> Spec:
    with h5py.File(folder / "a.h5", "w") as file:
        chunks = (min(7, len(array)), *array.shape[1:])
        file.create_dataset("x", data=array, chunks=chunks, compression="gzip")
    return {"path": str(folder / "a.h5")}


def zarr_writer(version: int) -> Callable[[Path, np.ndarray], Spec]:
    def write(folder: Path, array: np.ndarray) -> Spec:
        zarr = pytest.importorskip("zarr", reason="needs zarr: pip install 'isoscale[zarr]'")
        group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=version)
        group.create_array("x", data=array, chunks=(min(7, len(array)), *array.shape[1:]))
        return {"path": str(folder / "a.zarr")}

    return write


def write_raw(folder: Path, array: np.ndarray) -> Spec:
    array.tofile(folder / "a.bin")
    return {"path": str(folder / "a.bin"), "dtype": str(array.dtype), "shape": list(array.shape[1:])}


WRITERS = {
    "npy": write_npy,
    "npz": write_npz,
    "compressed npz": write_compressed_npz,
    "plain hdf5": write_plain_hdf5,
    "chunked hdf5": write_chunked_hdf5,
    "zarr 2": zarr_writer(2),
    "zarr 3": zarr_writer(3),
    "raw": write_raw,
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[np.ndarray], Spec]:
    """Write an array in one of the formats; returns how to open it."""
    return lambda array: WRITERS[request.param](tmp_path, array)


@pytest.fixture
def refusal() -> Callable[..., str]:
    def refuse(function: Callable, *arguments: object, **named: object) -> str:
        with pytest.raises(UserError) as raised:
            function(*arguments, **named)
        return str(raised.value)

    return refuse


@pytest.fixture
def write_idx() -> Callable[[Path, np.ndarray], Path]:
    def write(path: Path, values: np.ndarray) -> Path:
        header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
        content = header + values.astype(np.uint8).tobytes()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write
