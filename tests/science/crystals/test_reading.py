"""Structures out of the files that people have: the same numbers, whatever the format."""

import gzip
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoscale.errors import UserError
from isoscale.science.crystals.reading.loading import load
from isoscale.science.crystals.reading.npz import write_npz
from isoscale.science.crystals.reading.opening import files_at, open_files, read_file, recognises
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable
from tests.science.crystals.made_structures import cubic, many, write_extxyz

ase = pytest.importorskip("ase")
pytest.importorskip("ase.db")
pytest.importorskip("ase.io")
SinglePointCalculator = pytest.importorskip("ase.calculators.singlepoint").SinglePointCalculator

VASPRUN = """<?xml version="1.0"?>
<modeling>
 <kpoints><varray name="kpointlist"><v>0 0 0</v></varray><varray name="weights"><v>1</v></varray></kpoints>
 <atominfo><array name="atoms"><set><rc><c>Cu</c><c>1</c></rc><rc><c>O </c><c>2</c></rc></set></array></atominfo>
 <structure name="initialpos"><crystal><varray name="basis"><v>3 0 0</v><v>0 3 0</v><v>0 0 4</v></varray></crystal>
  <varray name="positions"><v>0 0 0</v><v>0.5 0.5 0.5</v></varray></structure>
 <calculation>
  <structure><crystal><varray name="basis"><v>3 0 0</v><v>0 3 0</v><v>0 0 4</v></varray></crystal>
   <varray name="positions"><v>0 0 0</v><v>0.5 0.5 0.5</v></varray></structure>
  <varray name="forces"><v>0 0 0.25</v><v>0 0 -0.25</v></varray>
  <varray name="stress"><v>16.021766208 0 0</v><v>0 0 0</v><v>0 0 0</v></varray>
  <scstep><energy><i name="e_fr_energy">-7.5</i><i name="e_wo_entrp">-7.5</i><i name="e_0_energy">-7.25</i></energy>
  </scstep>
  <energy><i name="e_fr_energy">-7.5</i><i name="e_0_energy">-7.25</i><i name="e_wo_entrp">-7.25</i></energy>
 </calculation>
</modeling>
"""


def table_of(*paths: Path | str) -> StructureTable:
    return load(open_files([str(path) for path in paths]), {}, {}).table


def atoms_of(structure: Structure) -> Any:
    made = ase.Atoms(structure.numbers, structure.positions, cell=structure.cell, pbc=structure.pbc)
    tensor = structure.targets["stress"]
    voigt = [tensor[row, column] for row, column in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))]
    made.calc = SinglePointCalculator(
        made, energy=float(structure.targets["energy"]), forces=structure.targets["forces"], stress=voigt
    )
    return made


def assert_same(found: StructureTable, expected: list[Structure], tolerance: float = 1e-7) -> None:
    table = StructureTable.of(expected)
    assert found.counts.tolist() == table.counts.tolist()
    assert found.numbers.tolist() == table.numbers.tolist()
    assert found.pbc.tolist() == table.pbc.tolist()
    np.testing.assert_allclose(found.positions, table.positions, atol=tolerance)
    np.testing.assert_allclose(found.cells, table.cells, atol=tolerance)
    for name, target in table.targets.items():
        np.testing.assert_allclose(found.targets[name].values, target.values, atol=tolerance, err_msg=name)
        assert found.targets[name].per == target.per
        assert found.targets[name].has.all()


@pytest.mark.parametrize("name", ["a.extxyz", "a.traj", "a.db", "a.json", "a.npz"])
def test_every_format_gives_the_same_structures(tmp_path: Path, name: str) -> None:
    """What ase or we have written is read with its targets."""
    structures = many(7)
    path = tmp_path / name
    if name.endswith(".npz"):
        write_npz(StructureTable.of(structures), path)
    elif name.endswith((".db", ".json")):
        with ase.db.connect(path) as database:
            for structure in structures:
                database.write(atoms_of(structure))
    else:
        ase.io.write(path, [atoms_of(structure) for structure in structures])
    assert recognises(path)
    assert_same(table_of(path), structures)


def test_output_of_vasp_is_read_in_our_units(tmp_path: Path) -> None:
    """A stress in kbar, positive under compression, becomes ASE's; the energy is e_0, and others are named."""
    (tmp_path / "vasprun.xml").write_text(VASPRUN)
    loaded = load(open_files(str(tmp_path / "vasprun.xml")), {}, {})
    assert loaded.sources["stress"] == "format"
    assert loaded.table.targets["energy"].values.tolist() == [-7.25]
    assert loaded.table.targets["forces"].values[0].tolist() == [0, 0, 0.25]
    np.testing.assert_allclose(loaded.table.targets["stress"].values[0], np.diag([-0.01, 0, 0]), rtol=1e-6)
    assert any("free_energy" in remark for remark in loaded.remarks)


def test_of_a_calculation_in_a_folder_the_file_that_says_most_is_read(tmp_path: Path) -> None:
    """Each folder once, in the order of numbers, whatever else lies there."""
    for name in ("run10", "run9"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "vasprun.xml").write_text(VASPRUN)
        ase.io.write(folder / "POSCAR", atoms_of(cubic((1, 1, 1))), format="vasp")
        (folder / "notes.json").write_text('{"a": 1}')
        np.savez(folder / "other.npz", a=np.zeros(3))
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [path.parent.name for path in files_at(str(tmp_path))] == ["run9", "run10"]
    assert table_of(tmp_path).names == ["run9/vasprun.xml", "run10/vasprun.xml"]


def test_structures_without_targets_are_read_from_poscar_and_cif(tmp_path: Path) -> None:
    """Names of VASP, and what ends with .cif."""
    atoms = atoms_of(cubic((1, 1, 1), strain=0.0))
    ase.io.write(tmp_path / "POSCAR", atoms, format="vasp")
    ase.io.write(tmp_path / "a.cif", atoms)
    for name in ("POSCAR", "a.cif"):
        table = table_of(tmp_path / name)
        assert len(table) == 1
        assert table.counts.tolist() == [4]
        assert "energy" not in table.targets
        assert table.pbc.all()


numbers = st.integers(1, 92)
values = st.floats(-50, 50).map(lambda value: round(value, 6))


@st.composite
def any_atoms(draw: st.DrawFn) -> Any:
    count = draw(st.integers(1, 5))
    made = ase.Atoms(
        draw(st.lists(numbers, min_size=count, max_size=count)),
        np.array(draw(st.lists(values, min_size=3 * count, max_size=3 * count))).reshape(count, 3),
    )
    if draw(st.booleans()):
        made.cell = (
            np.diag([7.0, 8.0, 9.0]) + np.array(draw(st.lists(values, min_size=9, max_size=9))).reshape(3, 3) / 60
        )
        made.pbc = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    made.info["gap"] = draw(values)
    made.info["class"] = draw(st.integers(0, 5))
    made.info["dipole_moment"] = np.array(draw(st.lists(values, min_size=3, max_size=3)))
    made.info["note"] = draw(st.sampled_from(["plain", "two words", "a=b", 'a "quoted" word', "x, y"]))
    made.arrays["weights"] = np.array(draw(st.lists(values, min_size=count, max_size=count)))
    results = {
        "energy": draw(values),
        "forces": np.array(draw(st.lists(values, min_size=3 * count, max_size=3 * count))),
    }
    made.calc = SinglePointCalculator(made, energy=results["energy"], forces=results["forces"].reshape(count, 3))
    return made


@settings(max_examples=40)
@given(frames=st.lists(any_atoms(), min_size=1, max_size=4))
def test_what_ase_writes_as_extxyz_is_read_as_ase_reads_it(
    frames: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Our reader is faster, and no other."""
    path = tmp_path_factory.mktemp("any") / "a.extxyz"
    ase.io.write(path, frames)
    read = ase.io.read(path, ":")
    for ours, theirs in zip(read_file(path).structures, read, strict=True):
        assert ours.numbers.tolist() == theirs.numbers.tolist()
        assert ours.pbc.tolist() == theirs.pbc.tolist()
        np.testing.assert_array_equal(ours.positions, theirs.positions)
        np.testing.assert_array_equal(ours.cell, theirs.cell.array)
        np.testing.assert_array_equal(ours.targets["forces"], theirs.get_forces())
        assert float(ours.targets["energy"]) == theirs.get_potential_energy()
        assert float(ours.targets["gap"]) == theirs.info["gap"]
        assert int(ours.targets["class"]) == theirs.info["class"]
        np.testing.assert_array_equal(ours.targets["dipole_moment"], theirs.info["dipole_moment"])
        np.testing.assert_array_equal(ours.targets["weights"], theirs.arrays["weights"])
        assert ours.per_atom == {"forces", "weights"}


def test_other_peoples_names_are_known(tmp_path: Path) -> None:
    """REF_energy and the like are taken where there is nothing else; a virial makes a stress."""
    text = (
        '1\nLattice="2 0 0 0 2 0 0 0 2" Properties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy=-2 '
        'virial="8 0 0 0 0 0 0 0 0" config_type=bulk\nCu 0 0 0 1 2 3\n'
    )
    (tmp_path / "a.xyz").write_text(text)
    table = table_of(tmp_path / "a.xyz")
    assert table.targets["energy"].values.tolist() == [-2]
    assert table.targets["forces"].values.tolist() == [[1, 2, 3]]
    np.testing.assert_allclose(table.targets["stress"].values[0], np.diag([-1, 0, 0]))
    assert table.names == ["bulk"]


def test_energy_goes_before_its_rivals_and_says_so(tmp_path: Path) -> None:
    """Frames are never mixed: what one of them has, no other spelling stands in for."""
    text = "1\nenergy=-1 REF_energy=-2\nCu 0 0 0\n1\nREF_energy=-3\nCu 0 0 0\n"
    (tmp_path / "a.xyz").write_text(text)
    loaded = load(open_files(str(tmp_path / "a.xyz")), {}, {})
    assert loaded.table.targets["energy"].has.tolist() == [True, False]
    assert any("REF_energy" in remark for remark in loaded.remarks)
    assert any("missing in 1 of 2" in remark for remark in loaded.remarks)
    other = load(open_files(str(tmp_path / "a.xyz")), {}, {"energy": "REF_energy"})
    assert other.table.targets["energy"].values.tolist() == [-2, -3]


def test_an_upper_triangle_is_filled_in(tmp_path: Path) -> None:
    """Of a stress whose lower half is zero everywhere."""
    arrays = {
        "ptr": [0, 1, 2], "z": [29, 29], "pos": np.zeros((2, 3)), "cell": np.eye(3) * 3, "pbc": [True] * 3,
        "stress": np.triu(np.arange(18).reshape(2, 3, 3) + 1.0),
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    stress = table_of(tmp_path / "a.npz").targets["stress"].values
    np.testing.assert_array_equal(stress, stress.transpose(0, 2, 1))
    assert stress[1, 2, 0] == stress[1, 0, 2] == 12


def test_voigt_has_the_order_of_ase(tmp_path: Path) -> None:
    """xx, yy, zz, yz, xz, xy."""
    (tmp_path / "a.xyz").write_text('1\nLattice="3 0 0 0 3 0 0 0 3" stress="1 2 3 4 5 6"\nCu 0 0 0\n')
    stress = table_of(tmp_path / "a.xyz").targets["stress"].values[0]
    assert stress.tolist() == [[1, 6, 5], [6, 2, 4], [5, 4, 3]]


def write_lmdb(path: Path, records: list[bytes]) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path), subdir=False, map_size=1 << 24) as opened, opened.begin(write=True) as transaction:
        for number, record in enumerate(records):
            transaction.put(str(number).encode(), record)
    return path


def test_lmdb_of_the_peer_is_read_with_its_own_names(tmp_path: Path) -> None:
    """Tensors or arrays, one-atom cells, targets inside of `targets`, sizes that differ."""
    torch = pytest.importorskip("torch")
    structures = [cubic((1, 1, 1)), cubic((2, 1, 1), seed=1)]
    records = []
    for structure in structures:
        record = {
            "pos": torch.tensor(structure.positions), "atomic_numbers": torch.tensor(structure.numbers),
            "cell": structure.cell[None], "pbc": np.ones(3), "natoms": len(structure),
            "force": structure.targets["forces"], "stress": structure.targets["stress"],
            "potential-energy": torch.tensor([float(structure.targets["energy"])]), "targets": {"band_gap": 0.5},
        }  # fmt: skip
        records.append(pickle.dumps(record))
    records.append(
        pickle.dumps(
            {"pos": np.zeros((1, 3)), "atomic_numbers": [29], "cell": np.eye(3) * 2, "force": np.zeros((1, 3)),
             "potential-energy": np.array([-1.0]), "stress": np.zeros((3, 3)), "targets": {"band_gap": np.array([0.5])}}
        )
    )  # fmt: skip
    path = write_lmdb(tmp_path / "a.lmdb", records)
    assert recognises(path)
    table = table_of(path)
    assert table.counts.tolist() == [4, 8, 1]
    assert table.targets["band_gap"].values.tolist() == [0.5] * 3
    assert table.targets["forces"].values.shape == (13, 3)
    assert_same(table.subset([0, 1]), structures)


class Hostile:
    """Runs a command where it is unpickled carelessly."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def test_hostile_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    """Nothing of them is run, and the record is named."""
    mark = tmp_path / "was_here"
    good = pickle.dumps({"pos": np.zeros((1, 3)), "atomic_numbers": [29], "energy": 1.0})
    path = write_lmdb(tmp_path / "a.lmdb", [good, pickle.dumps({"pos": Hostile(mark)})])
    with pytest.raises(UserError, match=r"record 1.*system"):
        read_file(path)
    assert not mark.exists()


def test_records_that_are_no_structures_are_refused(tmp_path: Path) -> None:
    """With what they have instead."""
    path = write_lmdb(tmp_path / "a.lmdb", [pickle.dumps({"image": np.zeros(3)})])
    assert not recognises(path)
    with pytest.raises(UserError, match=r"no numbers .* it has image"):
        read_file(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.extxyz", "", "is empty"),
        ("a.extxyz", "\n\n", "holds no structure"),
        ("a.extxyz", "3\n\nCu 0 0 0\n", "truncated: frame 0, from line 1, should have 3 atoms and has 1"),
        ("a.extxyz", "1\n", "truncated"),
        ("a.extxyz", "2\n\nCu 0 0 0\nCu 0 0", "line 4: 3 values, expected 4"),
        ("a.extxyz", "1\n\nCu 0 0 zero\n", "line 3, column pos"),
        ("a.extxyz", "1\n\nCu 0 0 0\nCu 1 1 1\n", "line 4: expected the number of atoms of frame 1"),
        ("a.extxyz", "0\n\n", "frame 0 has 0 atoms"),
        ("a.extxyz", "1\n\nXy 0 0 0\n", 'line 3: there is no element "Xy"'),
        ("a.extxyz", "1\nProperties=pos:R:3\n0 0 0\n", "names no elements"),
        ("a.extxyz", "1\nProperties=species:S:1\nCu\n", "names no positions"),
        ("a.extxyz", "1\nProperties=species:S:1:pos:Q:3\nCu 0 0 0\n", "kind 'Q'"),
        ("a.extxyz", '1\nLattice="1 2 3"\nCu 0 0 0\n', "3 numbers, expected 9"),
        ("a.extxyz", '1\nstress="1 2 3 4"\nCu 0 0 0\n', "6 or 9 numbers, found 4"),
        ("a.extxyz", 'virial\n', "number of atoms"),
        ("a.npz", "PK, but no zip", "cannot read"),
        ("a.lmdb", "no database at all" * 500, "not a readable LMDB"),
        ("a.db", "no database at all" * 500, "database of ASE"),
        ("a.json", '{"1": {"a": 2}}', "cannot be read as json"),
        ("POSCAR", "hello\n", "cannot be read as vasp"),
        ("OUTCAR", " vasp.5.4\n", "cannot be read as vasp-out"),
        ("vasprun.xml", "<modeling>\n<gen", "cannot be read as vasp-xml"),
        ("a.cif", "data_x\n", "holds no structure"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused_with_the_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Each with words of what is wrong with it."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        table_of(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "has a, but no ptr and no pos and no z"),
        ({"ptr": [0, 2], "pos": np.zeros((1, 3)), "z": [29]}, "ptr should rise from 0 to the 1 atoms"),
        ({"ptr": [0, 1], "pos": np.zeros((1, 2)), "z": [29]}, "pos has the shape"),
        ({"ptr": [0, 1], "pos": np.zeros((1, 3)), "z": [29], "cell": np.zeros((2, 2))}, "cell has the shape"),
        ({"ptr": [0, 1], "pos": np.zeros((1, 3)), "z": [29], "energy": np.zeros(4)}, "neither a row per structure"),
        ({"ptr": [0, 1], "pos": np.array([{}], dtype=object), "z": [29]}, "holds pickles"),
    ],
)
def test_an_npz_that_is_no_such_is_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    """With what it should have."""
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=message):
        table_of(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("comment", "atom", "message"),
    [
        ('Lattice="3 0 0 0 3 0 0 0 3"', "Cu nan 0 0", "positions that are not numbers"),
        ('pbc="T T T"', "Cu 0 0 0", "has no volume"),
        ('Lattice="3 0 0 0 3 0 3 3 0"', "Cu 0 0 0", "has no volume"),
        ('Lattice="3 0 0 0 3 0 0 0 0" pbc="T F T"', "Cu 0 0 0", "has no volume"),
        ('Lattice="nan 0 0 0 3 0 0 0 3"', "Cu 0 0 0", "cell that is not made of numbers"),
        ("", "X 0 0 0", "atomic number 0"),
    ],
)
def test_structures_that_make_no_sense_are_refused(tmp_path: Path, comment: str, atom: str, message: str) -> None:
    """With the frame that it is."""
    (tmp_path / "a.xyz").write_text(f"1\n\nCu 0 0 0\n1\n{comment}\n{atom}\n")
    with pytest.raises(UserError, match=rf"frame 1 .*{message}"):
        table_of(tmp_path / "a.xyz")


def test_a_slab_needs_no_third_vector(tmp_path: Path) -> None:
    """Only what is periodic needs a cell."""
    (tmp_path / "a.xyz").write_text('1\nLattice="3 0 0 0 3 0 0 0 0" pbc="T T F"\nCu 0 0 0\n')
    assert table_of(tmp_path / "a.xyz").pbc.tolist() == [[True, True, False]]


def test_targets_that_are_not_numbers_are_missing(tmp_path: Path) -> None:
    """NaN in one frame is said, and counts as none."""
    (tmp_path / "a.xyz").write_text("1\nenergy=nan\nCu 0 0 0\n1\nenergy=2\nCu 0 0 0\n1\n\nCu 0 0 0\n")
    loaded = load(open_files(str(tmp_path / "a.xyz")), {}, {})
    assert loaded.table.targets["energy"].has.tolist() == [False, True, False]
    assert loaded.table.targets["energy"].values.tolist() == [0, 2, 0]
    assert any("not a number in 1 of 3" in remark and "frame 0" in remark for remark in loaded.remarks)


def test_values_whose_shape_varies_are_left_out_and_named(tmp_path: Path) -> None:
    """Other people's notes are no reason to stop."""
    (tmp_path / "a.xyz").write_text('1\nk="1 2" energy=1\nCu 0 0 0\n1\nk="1 2 3" energy=1\nCu 0 0 0\n')
    loaded = load(open_files(str(tmp_path / "a.xyz")), {}, {})
    assert "k" not in loaded.table.targets
    assert any(remark.startswith("k is left out") for remark in loaded.remarks)


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("a=1,2,3", [1, 2, 3]),
        ("a=1, b=2", 1),
        ('a="1 2 3"', [1, 2, 3]),
        ("a={1 2 3}", [1, 2, 3]),
        ("a=[1, 2, 3] b=2", [1, 2, 3]),
        ("a=[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
        ("a = 1.5", 1.5),
        ("a=-1.5d-3", -0.0015),
        ("a=T", 1),
        ('a="1 0 0 0 1 0 0 0 1"', np.eye(3).tolist()),
    ],
)
def test_values_of_a_comment_are_read_in_all_their_spellings(tmp_path: Path, comment: str, expected: object) -> None:
    """As ASE takes them, and as Fortran writes numbers."""
    (tmp_path / "a.xyz").write_text(f"1\n{comment} energy=1\nCu 0 0 0\n")
    assert table_of(tmp_path / "a.xyz").targets["a"].values[0].tolist() == expected


def test_names_that_batches_use_are_left_out_and_can_be_renamed(tmp_path: Path) -> None:
    """A number called batch is no reason to stop either."""
    (tmp_path / "a.xyz").write_text("1\nbatch=3 has_gap=1 energy=1\nCu 0 0 0\n")
    loaded = load(open_files(str(tmp_path / "a.xyz")), {}, {})
    assert loaded.table.targets.keys() == {"energy"}
    assert any("data.targets.my_batch=batch" in remark for remark in loaded.remarks)
    assert "number" in load(open_files(str(tmp_path / "a.xyz")), {}, {"number": "batch"}).table.targets


def test_compressed_files_are_read_and_cut_ones_refused(tmp_path: Path) -> None:
    """gzip, by what is in the file."""
    structures = many(3)
    plain = write_extxyz(tmp_path / "a.extxyz", structures).read_bytes()
    packed = gzip.compress(plain)
    (tmp_path / "b.extxyz.gz").write_bytes(packed)
    assert_same(table_of(tmp_path / "b.extxyz.gz"), structures)
    (tmp_path / "c.extxyz.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match="damaged"):
        table_of(tmp_path / "c.extxyz.gz")


def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    """The nearest names."""
    write_extxyz(tmp_path / "train.extxyz", many(1))
    with pytest.raises(UserError, match=r"there is no file .*trian.extxyz; in .* there is train.extxyz; name yours"):
        open_files(str(tmp_path / "trian.extxyz"), "name yours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="hold no structures"):
        open_files(str(tmp_path / "empty"))


def test_without_ase_its_formats_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And extxyz and npz are read all the same."""
    ase.io.write(tmp_path / "a.cif", atoms_of(cubic((1, 1, 1))))
    write_extxyz(tmp_path / "a.extxyz", many(1))
    for name in ("ase", "ase.io", "ase.io.formats", "ase.db"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install 'isoscale\[crystals\]'"):
        read_file(tmp_path / "a.cif")
    assert len(table_of(tmp_path / "a.extxyz")) == 1


def test_files_that_ase_would_unpickle_are_refused(tmp_path: Path) -> None:
    """A bundle of trajectories may hold pickles."""
    ase.io.write(tmp_path / "a.bundle", atoms_of(cubic((1, 1, 1))), format="bundletrajectory")
    with pytest.raises(UserError):
        read_file(tmp_path / "a.bundle")


def test_real_files_hold_what_is_known_of_them(shared: Path) -> None:
    """Numbers of structures, and the same of both copies of the devsets."""
    folder = shared / "data" / "crystals"
    for name, count in (("lips_devset", 200), ("colabfit_devset", 262)):
        copies = [table_of(folder / f"{name}{ending}") for ending in (".npz", ".lmdb")]
        assert [len(table) for table in copies] == [count, count]
        np.testing.assert_allclose(copies[0].positions, copies[1].positions, atol=1e-5)
        for target in copies[0].targets:
            np.testing.assert_allclose(
                copies[0].targets[target].values, copies[1].targets[target].values, atol=1e-4, err_msg=target
            )
    train = table_of(folder / "mlearn" / "Cu_train.extxyz")
    assert len(train) == 262
    assert train.elements.tolist() == [29]
    mptrj = load(open_files(str(folder / "mptrj_random_1k.extxyz")), {}, {})
    assert len(mptrj.table) == 1000
    assert len(mptrj.table.elements) == 85
    assert mptrj.sources["stress"] == "file"
