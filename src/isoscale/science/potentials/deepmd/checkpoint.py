"""Potentials that DeePMD-kit has trained: its PyTorch checkpoints, as models of ours."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isoscale.errors import UserError
from isoscale.science.potentials.model import DeepPotential
from isoscale.science.potentials.se_e2_a import SeE2A

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "type": ("standard",), "bridging_method": ("None", "none"),
    "pair_exclude_types": ([],), "atom_exclude_types": ([],),
    "descriptor.type": ("se_e2_a", "se_a"), "descriptor.activation_function": ("tanh",),
    "descriptor.exclude_types": ([],), "descriptor.env_protection": (0,),
    "fitting_net.type": ("ener",), "fitting_net.activation_function": ("tanh",),
}  # fmt: skip
"""Settings that change what a model says while its weights look the same, and how models are here."""
LAYER = re.compile(r"(descriptor\.sea|fitting_net)\.filter_layers\.networks\.(\d+)\.layers\.(\d+)\.(matrix|bias|idt)")
KINDS = {"matrix": "weight", "bias": "bias", "idt": "dt"}
BESIDES = re.compile(r"min_nbor_dist|atomic_model\.out_std|.*\.(filter_layers\._networks|compress_(info|data))\..*")
"""No weights of their own: networks are there twice."""

MEASURED = (
    "atomic_model.descriptor.sea.mean", "atomic_model.descriptor.sea.stddev", "atomic_model.out_bias",
    "atomic_model.fitting_net.bias_atom_e",
)  # fmt: skip
"""What is measured on data; the first two are repeated for every slot, and energies of lone atoms are in two places."""


def potential(found: Any) -> DeepPotential | None:
    """The potential in what a file of torch holds; None if that is no checkpoint of DeePMD-kit."""
    saved = found.get("model", found) if isinstance(found, Mapping) else None
    extra = saved.get("_extra_state") if isinstance(saved, Mapping) else None
    if saved is None or not isinstance(extra, Mapping) or "model_params" not in extra:
        return None
    said = extra["model_params"]
    _check(said)
    descriptor, fitting = said["descriptor"], said["fitting_net"]
    model = DeepPotential(
        said["type_map"],
        SeE2A(
            descriptor["sel"], descriptor["rcut"], descriptor["rcut_smth"], descriptor["neuron"],
            descriptor["axis_neuron"], descriptor["resnet_dt"], descriptor["type_one_side"],
        ),
        fitting["neuron"],
        fitting["resnet_dt"],
    )  # fmt: skip
    weights = _weights(saved, len(fitting["neuron"]), 1 if descriptor["type_one_side"] else len(model.types))
    model.load_state_dict(weights, assign=True)
    return model


def _check(said: Mapping[str, Any]) -> None:
    if "model_dict" in said:
        raise UserError("a checkpoint of DeePMD-kit with several heads: only models with a single one are known here")
    for name, known in PLAIN.items():
        section, _, key = name.rpartition(".")
        value = (said.get(section, {}) if section else said).get(key, known[0])
        if value not in known:
            raise UserError(f"a checkpoint of DeePMD-kit whose model.{name} is {value!r}: known here is {known[0]!r}")


def _weights(saved: Mapping[str, Any], num_hidden: int, num_centres: int) -> dict[str, Tensor]:
    """By the names that they have here; one that is not understood is an error: it would change what the model says.

    Filter networks are for each of `num_centres` types of atoms, where these have their own.
    """
    found: dict[str, Tensor] = {}
    own = {_own_name(name): tensor for name, tensor in saved.items() if name != "_extra_state"}
    for name, tensor in own.items():
        match = LAYER.fullmatch(name.removeprefix("atomic_model."))
        if match:
            found[_layer_name(match, num_hidden, num_centres)] = tensor
        elif name not in MEASURED and not BESIDES.fullmatch(name):
            raise UserError(f"a checkpoint of DeePMD-kit with weights that are not known here: {name}")
    mean, spread, bias, more = (own[name] for name in MEASURED)
    found |= {"descriptor.mean": mean[:, 0, 0].double(), "descriptor.scale": spread[:, 0, :2].double()}
    return found | {"energy_bias": (bias[0] + more).double().flatten()}


def _own_name(name: str) -> str:
    """Without the name of the head."""
    return ".".join(name.split(".")[2:])


def _layer_name(match: re.Match[str], num_hidden: int, num_centres: int) -> str:
    part, network, layer, kind = match.groups()
    if part == "fitting_net":
        place = "" if int(layer) == num_hidden else f"layers.{layer}."
        return f"fitting.{network}.{place}{KINDS[kind]}"
    neighbour, centre = divmod(int(network), num_centres)
    own = centre * num_centres + neighbour  # pairs of types are counted the other way round
    return f"descriptor.networks.{own}.layers.{layer}.{KINDS[kind]}"
