"""One input file of DeePMD-kit under every launcher: the same learning curve, to the byte."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.mpi import CLEAN, ISOSCALE, MPICH, OPEN_MPI, Mpi, run
from tests.cluster.test_torchrun import TORCHRUN
from tests.helpers import sha
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import free_port

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

SMALL = (
    "training.numb_steps=6", "training.disp_freq=2", "training.save_freq=2", "training.training_data.batch_size=2",
    "model.descriptor.neuron=[4,8]", "model.descriptor.axis_neuron=2", "model.fitting_net.neuron=[8,8]",
    "model.descriptor.rcut=4.0", "model.data_stat_nbatch=1", "learning_rate.decay_steps=2",
)  # fmt: skip
"""In the words of the file; two workers with 2 frames each make a batch of 4."""
OURS = ("parallel.reduce=tree", "train.threads=1")


@pytest.fixture(scope="module")
def written(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folders as DeePMD-kit ships them: the input beside the data."""
    folder = tmp_path_factory.mktemp("water")
    (folder / "data").symlink_to(shared / "data/potentials/water")
    (folder / "se_e2_a").mkdir()
    content = json.loads((shared / "data/potentials/input_torch.json").read_text())
    del content["training"]["stat_file"]
    (folder / "se_e2_a/input.json").write_text(json.dumps(content))
    return folder / "se_e2_a/input.json"


def words(written: Path, where: str = "run") -> tuple[str, ...]:
    return (ISOSCALE, "train", str(written), *SMALL, *OURS, "--run", where)


@pytest.fixture(scope="module")
def expected(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    done = run([*TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python", "--", *words(written)], folder)
    assert done.returncode == 0, done.stderr
    assert "2, tree reduction over Gloo" in done.stdout
    assert re.search(r"data_0 +80 +192 +4 +20 +0\.2500", done.stdout), done.stdout
    return folder / "run"


def assert_same(found: Path, expected: Path) -> None:
    assert (found / "lcurve.out").read_bytes() == (expected / "lcurve.out").read_bytes()
    assert sha(found) == sha(expected)


def test_torchrun_trains_from_an_input_file_with_a_batch_for_each_worker(expected: Path) -> None:
    head, _, *rows = (expected / "lcurve.out").read_text().splitlines()
    assert head.split()[1:] == [
        "step", "rmse_val", "rmse_trn", "rmse_e_val", "rmse_e_trn", "rmse_f_val", "rmse_f_trn", "lr",
    ]  # fmt: skip
    assert [int(row.split()[0]) for row in rows] == [1, 2, 4, 6]
    assert json.loads((expected / "run.json").read_text())["ranks"] == 2


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=lambda mpi: mpi.name)
def test_mpirun_gives_the_same_curve(mpi: Mpi, written: Path, expected: Path, tmp_path: Path) -> None:
    done = run(mpi.command(2, *words(written)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", expected)


def test_one_process_with_the_whole_batch_gives_the_same_curve(written: Path, expected: Path, tmp_path: Path) -> None:
    """What two workers with 2 frames each do, said for one: 4 frames, and the learning rate of two workers."""
    own = ("training.training_data.batch_size=4", "learning_rate.start_lr=0.002")
    done = run([*words(written), *own], tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", expected)


def test_a_run_of_two_workers_goes_on_with_one(expected: Path, tmp_path: Path) -> None:
    """The batch of the first start stays that of the run."""
    continued_at(2, expected, tmp_path / "run")
    done = run([ISOSCALE, "train", "--run", "run"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path / "run", expected)


def test_the_variables_of_horovods_launcher_are_understood(written: Path, expected: Path, tmp_path: Path) -> None:
    variables = {**CLEAN, "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                 "HOROVOD_GLOO_RENDEZVOUS_PORT": str(free_port())}  # fmt: skip
    ranks = [
        subprocess.Popen(
            words(written), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**variables, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    ends = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], ends
    assert_same(tmp_path / "run", expected)


def test_srun_on_two_nodes_gives_the_same_curve(
    slurm: "Cluster", written: Path, expected: Path, tmp_path: Path
) -> None:
    done = slurm.run("srun", "-N2", "-n2", *words(written), cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(json.loads((tmp_path / "run/run.json").read_text())["hosts"]) == ["n1", "n2"]
    assert_same(tmp_path / "run", expected)


def test_scale_prints_the_table_of_a_scaling_test(written: Path, tmp_path: Path) -> None:
    small = [word for word in SMALL if not word.startswith("training.numb_steps")]
    study = ("--ranks", "1,2", "--steps", "4", "--repeats", "1", "--run", "study")
    done = run([sys.executable, "-m", "isoscale", "scale", str(written), *small, *study], tmp_path)
    assert done.returncode == 0, done.stderr
    head, one, two = done.stdout.split("\n\n")[1].splitlines()
    assert re.split(r" {2,}", head)[:5] == ["ranks", "batch", "s per 100 samples", "samples/s", "speed-up"]
    assert one.split()[0] == "1" and two.split()[0] == "2"
