"""What the files beside a snapshot say of its calculation, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoscale.errors import UserError
from isoscale.science.electronic.calculation import BOHR, RYDBERG, read_calculation
from isoscale.science.electronic.integrals import BOLTZMANN

OUTPUT = """
     Program PWSCF v.7.2 starts on 14Mar2024 at 10: 0: 0

     bravais-lattice index     =            2
     lattice parameter (alat)  =       7.6300  a.u.
     unit-cell volume          =     111.0485 (a.u.)^3
     number of atoms/cell      =            1
     number of electrons       =         3.00
     celldm(1)=   7.630000  celldm(2)=   0.000000  celldm(3)=   0.000000

     crystal axes: (cart. coord. in units of alat)
               a(1) = (  -0.500000   0.000000   0.500000 )
               a(2) = (   0.000000   0.500000   0.500000 )
               a(3) = (  -0.500000   0.500000   0.000000 )

     reciprocal axes: (cart. coord. in units 2 pi/alat)
               b(1) = ( -1.000000 -1.000000  1.000000 )

     number of k points=    10  Fermi-Dirac smearing, width (Ry)=  0.0100
     Dense  grid:     1067 G-vectors     FFT dimensions: (  15,  15,  15)
     Smooth grid:      869 G-vectors     FFT dimensions: (  12,  12,  12)
"""
VOLUME = 7.63**3 / 4 * BOHR**3
KELVIN = 0.01 * RYDBERG / BOLTZMANN


def written(folder: Path, text: str, name: str = "a.out") -> Path:
    (folder / name).write_text(text)
    return folder / name


def described(**changes: Any) -> dict[str, Any]:
    atoms = {"cell": [[2, 0, 0], [0, 3, 0], [0, 0, 4]], "numbers": [4, 4]}
    values = {"temperature": 300.0, "number_of_electrons_exact": 4.0, "atoms": atoms, "grid_dimensions": [2, 3, 4]}
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def test_both_files_of_a_real_calculation_say_the_same(shared: Path):
    folder = shared / "data/electronic/Be2"
    ours, theirs = (read_calculation(folder / f"Be_snapshot0{suffix}") for suffix in (".info.json", ".out"))
    assert theirs.volume == pytest.approx(ours.volume, rel=2e-6), "six digits are printed"
    assert theirs.temperature == pytest.approx(ours.temperature, rel=1e-6)
    assert (theirs.num_atoms, theirs.num_electrons, theirs.grid) == (ours.num_atoms, ours.num_electrons, ours.grid)
    assert (ours.num_atoms, ours.num_electrons, ours.grid) == (2, 4.0, (18, 18, 27))
    known = json.loads((folder / "Be_snapshot0.info.json").read_text())
    voxel = abs(np.linalg.det(np.array(known["voxel"]["array"])))
    assert ours.volume == pytest.approx(voxel * 18 * 18 * 27, rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("v.7.2", "v.5.0.2"),
        ("Fermi-Dirac smearing, width (Ry)=  0.0100", "gaussian broad. (Ry)=  0.0100     ngauss = -99"),
        ("width (Ry)=  0.0100", "width (Ry)=  1.0D-02"),
        ("=         3.00", "=         3.00 (up:   2.00, down:   1.00)"),
        ("bravais-lattice index     =            2", "bravais-lattice index     =            0"),
        ("(  -0.500000   0.000000   0.500000 )", "(  -0.500000  -0.000000   0.500000)"),
        ("a(2) = (   0.000000   0.500000   0.500000 )", "a(2) = (   0.000000   0.500000   0.500000 )  "),
    ],
)
def test_other_versions_and_settings_of_quantum_espresso(old: str, new: str, tmp_path: Path):
    found = read_calculation(written(tmp_path, OUTPUT.replace(old, new)))
    assert found.volume == pytest.approx(VOLUME, rel=1e-9)
    assert found.temperature == pytest.approx(KELVIN, rel=1e-9)
    assert (found.num_atoms, found.num_electrons, found.grid) == (1, 3.0, (15, 15, 15))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OUTPUT[: OUTPUT.index("crystal")], "the width of Fermi-Dirac smearing, the crystal axes not found"),
        ("slurmstepd: error: *** JOB 7 CANCELLED ***", "is not a usable output of Quantum ESPRESSO"),
        ("", "the lattice parameter, the number of atoms"),
        (OUTPUT.replace("Fermi-Dirac", "Marzari-Vanderbilt"), "width of another is not a temperature; write a "),
        (OUTPUT.replace("0.0100", "0.0000"), "temperature is 0; it must be larger"),
        (OUTPUT + "CELL_PARAMETERS (alat=  7.63)\n", "changes its cell on the way"),
    ],
)
def test_an_output_that_cannot_be_used_is_refused(text: str, words: str, tmp_path: Path):
    with pytest.raises(UserError) as error:
        read_calculation(written(tmp_path, text))
    assert words in str(error.value) and "a.out" in str(error.value)


def test_data_that_is_named_by_mistake_is_refused(tmp_path: Path):
    np.save(tmp_path / "a.out.npy", np.ones((4, 3), np.float32))
    with pytest.raises(UserError, match=r"a\.out\.npy is not a usable output of Quantum ESPRESSO"):
        read_calculation(tmp_path / "a.out.npy")
    with pytest.raises(UserError, match=r"cannot read .*missing.out: No such file"):
        read_calculation(tmp_path / "missing.out")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (described(temperature=None), "it has no 'temperature'"),
        (described(temperature="hot"), "could not convert"),
        (described(temperature=-3), "temperature is -3"),
        (described(number_of_electrons_exact=0), "num_electrons is 0"),
        (described(atoms={"cell": [[1, 0, 0], [0, 1, 0]], "numbers": [4]}), "cannot reshape"),
        (described(atoms={"cell": [[1, 0, 0], [2, 0, 0], [0, 0, 1]], "numbers": [4]}), "volume is 0"),
        (described(atoms={"cell": [[1, 0, 0], [0, 1, 0], [0, 0, 1]], "numbers": []}), "num_atoms is 0"),
        ([1, 2], "does not describe a calculation"),
    ],
)
def test_a_description_that_lacks_something_is_refused(values: Any, words: str, tmp_path: Path):
    with pytest.raises(UserError) as error:
        read_calculation(written(tmp_path, json.dumps(values), "a.info.json"))
    assert words in str(error.value) and "a.info.json" in str(error.value)


def test_a_description_that_was_cut_short_is_refused(tmp_path: Path):
    assert read_calculation(written(tmp_path, json.dumps(described()), "a.info.json")).volume == pytest.approx(24)
    with pytest.raises(UserError, match=r"a\.info\.json is not a complete JSON file"):
        read_calculation(written(tmp_path, json.dumps(described())[:40], "a.info.json"))
