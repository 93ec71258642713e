"""What a device is stands in one place: nobody else names a kind of device, or asks torch for what only one has."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isoscale.system import devices

PACKAGE = Path(devices.__file__).parents[1]
HOME = "system/devices.py"
ELSEWHERE = {
    "engine/step/cuda_graph.py": "captures steps into CUDA graphs, which no other kind has",
    "engine/step/graphed_evaluation.py": "captures evaluations into CUDA graphs",
    "engine/step/convolutions.py": "products of half precision with sums in float32, which only CUDA has",
    "engine/step/slow_convolutions.py": "times convolutions by CUDA events",
    "engine/config.py": "the kinds that a recipe may name",
    "observe/doctor/checks.py": "the names by which torch.version says what it was built for",
    "recipe/lightning.py": "the kinds that Lightning's Trainer names",
    "science/crystals/sums.py": "sends all components of vectors at once on CUDA, one by one elsewhere",
    "science/models.py": "a product of matrices written by hand for CUDA",
    "science/potentials/layers.py": "a sum of columns written as a product for CUDA",
}
"""Files that may speak of a kind of device, and why."""
PARTS = {"cuda", "xpu", "mps", "accelerator"}
"""Of torch, and under torch.backends."""
WORDS = {"cuda", "xpu", "mps"}


def spoken(source: str) -> Iterator[tuple[int, str]]:
    """Where a file speaks of a kind of device: the line, and what stands there. Docstrings are for people."""
    tree = ast.parse(source)
    documents = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=part) if part in PARTS:
                yield node.lineno, f"torch.{part}"
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="backends"), attr=part) if (
                part in PARTS | {"cudnn"}
            ):
                yield node.lineno, f"torch.backends.{part}"
            case ast.Attribute(attr="is_cuda" | "is_xpu" | "is_mps" as name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(module)) if module.startswith(tuple(f"torch.{part}" for part in PARTS)):
                yield node.lineno, module
            case ast.Constant(value=str(word)) if word in WORDS and id(node) not in documents:
                yield node.lineno, f'"{word}"'


def test_kinds_of_devices_are_told_apart_in_one_place() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        lines = [f"{name}:{line}: {what}" for line, what in spoken(path.read_text(encoding="utf-8"))]
        if lines and name != HOME:
            found[name] = lines
    strangers = [line for name, lines in found.items() if name not in ELSEWHERE for line in lines]
    assert not strangers, f"ask isoscale.system.devices instead:\n{chr(10).join(strangers)}"
    assert set(found) == set(ELSEWHERE), "an exception that is none any more"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()", "x = tensor.device.type == 'cuda'", "torch.backends.cudnn.benchmark = True",
        "from torch.cuda import Stream", "tensor.is_cuda", "torch.accelerator.synchronize()",
    ],
)  # fmt: skip
def test_a_line_that_knows_a_kind_of_device_is_noticed(line: str) -> None:
    assert list(spoken(f'"""cuda"""\n{line}\n'))


def test_every_kind_of_device_can_be_asked_the_same() -> None:
    for kind, cls in devices.KINDS.items():
        assert devices.of(torch.device(kind)).kind == kind == cls.kind
    assert list(devices.KINDS)[-1] == "cpu"


def test_a_cpu_copies_at_once_and_has_no_streams() -> None:
    cpu = devices.find("cpu")
    tensor = torch.arange(3.0)
    arrival = cpu.fetched(tensor)
    tensor.zero_()
    assert arrival.is_there and arrival.wait().tolist() == [0.0, 1.0, 2.0]
    assert cpu.new_stream() is None
    with cpu.on(None), cpu.apart():
        assert cpu.sent(torch.ones(2)).tolist() == [1.0, 1.0]
    assert cpu.total_memory > cpu.peak_memory > 0
    assert cpu.moment().seconds_until(cpu.moment()) >= 0


def test_settings_of_kernels_are_put_back() -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    with devices.chosen_kernels("cpu", not before[0], "auto", print):
        assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == (not before[0], True, False)
    assert (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_copies_beside_its_work() -> None:
    found = devices.find("cuda")
    assert isinstance(found, devices.Cuda) and found.name in found.description
    tensor = torch.arange(3.0, device=found.device)
    arrival = found.fetched(tensor)
    tensor.zero_()
    assert not arrival.is_there and arrival.wait().tolist() == [0.0, 1.0, 2.0]
    assert found.sent(torch.ones(2)).device == found.device
    stream = found.new_stream()
    with found.on(stream):
        assert found.running_stream() == stream
    assert 0 < found.free_memory <= found.total_memory
    assert found.moment().seconds_until(found.moment()) >= 0
