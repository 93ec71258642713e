"""Energies and forces of small Deep Potentials, as DeePMD-kit computes them, for the test beside this folder.

    PYTHON make.py reference.json

PYTHON is one that has DeePMD-kit with its PyTorch backend. Each architecture is trained for one step with its own
command, to get a checkpoint; all weights in it are replaced by those of `formula.py`; its calculator does the rest.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepmd import __version__ as version
from deepmd.infer import DeepPot
from formula import (
    CASES,
    CUTOFF,
    LEARNED,
    NUM_STEPS,
    RATE,
    SMOOTH,
    TYPES,
    WEIGHTS,
    Case,
    filled,
    frame,
    labels,
    statistics,
)

PREFIX = "model.Default.atomic_model."
NAMES = {"matrix": "weight", "bias": "bias", "idt": "dt"}
FILES = {"atom_energy": "atom_ener"}
TERMS = {"energy": "e", "force": "f", "virial": "v", "atom_energy": "ae"}


def write_system(folder: Path) -> None:
    """The frame as a system to train on."""
    made = frame()
    (folder / "set.000").mkdir(parents=True)
    np.savetxt(folder / "type.raw", made["types"], fmt="%d")
    (folder / "type_map.raw").write_text("\n".join(TYPES) + "\n")
    for name, array in {"coord": made["coord"], "box": made["box"], **labels()}.items():
        np.save(folder / "set.000" / f"{FILES.get(name, name)}.npy", array.reshape(1, -1))


def write_input(case: Case, folder: Path, num_steps: int) -> None:
    """The peer's input file of an architecture."""
    descriptor = {"type": "se_e2_a", "sel": case.sel, "rcut": CUTOFF, "rcut_smth": SMOOTH, "neuron": case.widths,
                  "axis_neuron": case.axis_width, "resnet_dt": case.dt, "type_one_side": case.one_side}  # fmt: skip
    data = {"systems": ["system"], "batch_size": 1}
    asked = {
        "model": {"type_map": TYPES, "descriptor": descriptor,
                  "fitting_net": {"neuron": case.fitting_widths, "resnet_dt": case.fitting_dt}},
        "learning_rate": {"type": "exp", "start_lr": RATE, "stop_lr": RATE, "decay_steps": 1},
        "loss": {"type": "ener", **{f"{when}_pref_{TERMS[name]}": weight for name, weight in WEIGHTS.items()
                                    for when in ("start", "limit")}},
        "training": {"training_data": data, "numb_steps": num_steps, "disp_freq": 1, "save_freq": num_steps},
    }  # fmt: skip
    (folder / "input.json").write_text(json.dumps(asked))


def checkpoint(case: Case, folder: Path) -> Path:
    """One of the peer's own, with the weights of the formula put into it."""
    write_system(folder / "system")
    write_input(case, folder, 1)
    train(folder)
    path = folder / "model.ckpt-1.pt"
    held = torch.load(path, weights_only=False)
    replace(held["model"], case)
    torch.save(held, path)
    return path


def train(folder: Path, *options: str) -> None:
    """Run the peer's command on the input file."""
    command = [str(Path(sys.executable).parent / "dp"), "--pt", "train", "input.json", "--skip-neighbor-stat"]
    subprocess.run([*command, *options], cwd=folder, check=True, capture_output=True)


def learned(case: Case, path: Path) -> Path:
    """The checkpoint after some steps from there."""
    shutil.copy(path, path.with_name("begin.pt"))
    write_input(case, path.parent, NUM_STEPS)
    train(path.parent, "--init-model", "begin.pt")
    return path.with_name(f"model.ckpt-{NUM_STEPS}.pt")


def keep(path: Path, name: str, folder: Path) -> None:
    """Copy a checkpoint without its optimizer, which is most of it."""
    torch.save({"model": torch.load(path, weights_only=True)["model"]}, folder / f"{name}.ckpt.pt")


def replace(weights: dict[str, Any], case: Case) -> None:
    """Put the formula's values where the peer has its own."""
    mean, scale, bias = statistics()
    for name, value in weights.items():
        if not isinstance(value, torch.Tensor):
            continue
        short = name.removeprefix(PREFIX)
        if short == "out_bias":
            value.copy_(torch.tensor(bias, dtype=value.dtype).view(value.shape))
        elif short == "descriptor.sea.mean":
            value.zero_()
            value[..., 0] = torch.tensor(mean, dtype=value.dtype).view(-1, 1)
        elif short == "descriptor.sea.stddev":
            value[..., 0] = torch.tensor(scale, dtype=value.dtype)[:, :1]
            value[..., 1:] = torch.tensor(scale, dtype=value.dtype)[:, 1:].unsqueeze(-1)
        elif "networks." in short:
            value.copy_(torch.from_numpy(filled(own_name(short, case), tuple(value.shape))))


def own_name(short: str, case: Case) -> str:
    """What isoscale calls a parameter of the peer's networks."""
    part, _, rest = short.replace("_networks.", "networks.").partition("networks.")
    network, _, layer, kind = rest.split(".")
    if part.startswith("descriptor"):
        return f"descriptor.networks.{network}.layers.{layer}.{NAMES[kind]}"
    if int(layer) == len(case.fitting_widths):
        return f"fitting.{network}.{NAMES[kind]}"
    return f"fitting.{network}.layers.{layer}.{NAMES[kind]}"


def evaluate(path: Path) -> dict[str, list[Any]]:
    """What the peer's calculator says of the frame."""
    made = frame()
    found = DeepPot(str(path)).eval(made["coord"][None], made["box"][None], made["types"], atomic=True)
    energy, force, virial, atom_energy = (np.asarray(each, np.float64) for each in found[:4])
    return {"energy": energy.item(), "force": force.reshape(-1, 3).tolist(), "virial": virial.reshape(3, 3).tolist(),
            "atom_energy": atom_energy.reshape(-1).tolist()}  # fmt: skip


def parameters(case: Case, path: Path) -> list[str]:
    """The parameters of the peer's networks, as isoscale calls them."""
    held = torch.load(path, weights_only=False)["model"]
    return sorted({own_name(name.removeprefix(PREFIX), case) for name in held if "networks." in name})


def main() -> None:
    """Evaluate all cases and write them."""
    found: dict[str, Any] = {"made with": f"DeePMD-kit {version}, torch {torch.__version__}"}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = checkpoint(case, Path(folder))
            found[name] = {**evaluate(path), "parameters": parameters(case, path)}
            if name in LEARNED:
                after = learned(case, path)
                found[name]["learned"] = evaluate(after)
                keep(after, name, Path(sys.argv[1]).parent)
        print(name, found[name]["energy"], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
