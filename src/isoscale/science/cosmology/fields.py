"""The fields of a box by name: which they are, and which of them are vectors."""

from collections.abc import Sequence

from isoscale.errors import UserError

NBODY = ("density", "velocity_x", "velocity_y", "velocity_z")
HYDRO = (*NBODY, "temperature")
FIELDS = {"Nbody": NBODY, "Hydro": HYDRO}
"""The arrays of a file and their fields, in order, as NERSC's N-body → hydro data has them."""
COMPONENTS = ("_x", "_y", "_z")


def vector_channels(names: Sequence[str]) -> list[list[int]]:
    """The channels of the x, y and z component of each vector: `velocity_x`, `velocity_y` and `velocity_z` are one."""
    if len(set(names)) < len(names):
        raise UserError(f"two of the fields {', '.join(names)} have the same name: give each its own")
    stems = list(dict.fromkeys(name[:-2] for name in names if name[-2:] in COMPONENTS))
    for stem in stems:
        missing = [stem + component for component in COMPONENTS if stem + component not in names]
        if missing:
            raise UserError(
                f"the fields {', '.join(names)} have no {' and no '.join(missing)}: a vector turns with all three of "
                f"its components. Add what is missing, or give what is left a name that does not end in _x, _y or _z"
            )
    return [[names.index(stem + component) for component in COMPONENTS] for stem in stems]
