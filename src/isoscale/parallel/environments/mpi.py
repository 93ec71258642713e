"""What `mpirun` tells the processes that it starts; no MPI library is needed, since only the numbers are used.

Nothing tells them where rank 0 is when there are several hosts. It mostly is on the first host of the batch job, or
where mpirun itself runs; rank 0 sees when it is not.
"""

import os
import re
from pathlib import Path

from isoscale.parallel.environments.base import Numbering, Place, Variables
from isoscale.parallel.environments.schedulers import first_of_job, job_id

PROXY = "hydra_pmi_proxy"
"""The parent of all processes that MPICH starts on a host."""
_NAMESPACE = re.compile(r"prterun-(.+)-\d+@\d+")
_ADDRESS = re.compile(r";tcp://([\d.]+)")


class OpenMpi(Numbering):
    """Open MPI, from version 4 on."""

    name = "Open MPI (mpirun)"
    rank = "OMPI_COMM_WORLD_RANK"
    world = "OMPI_COMM_WORLD_SIZE"
    local_rank = "OMPI_COMM_WORLD_LOCAL_RANK"
    local_world = "OMPI_COMM_WORLD_LOCAL_SIZE"
    advice = "export MASTER_ADDR, the name of that host, and pass it on: mpirun -x MASTER_ADDR …"

    def job(self, variables: Variables, on_one_host: bool) -> str:
        """The number of this start, which holds the host and the process of mpirun."""
        return variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or job_id(variables)

    def first_host(self, variables: Variables) -> Place | None:
        """The first host of the batch job, or else that of mpirun: by name in version 5, by address in version 4."""
        name = _NAMESPACE.fullmatch(variables.get("PMIX_NAMESPACE", ""))
        address = _ADDRESS.search(variables.get("OMPI_MCA_orte_hnp_uri", ""))
        found = name or address
        return first_of_job(variables) or (Place(found[1], "the host of mpirun") if found else None)


class Hydra(Numbering):
    """MPICH, Intel MPI and others with the same process manager."""

    name = "MPICH or Intel MPI (mpirun)"
    rank = "PMI_RANK"
    world = "PMI_SIZE"
    local_rank = "MPI_LOCALRANKID"
    local_world = "MPI_LOCALNRANKS"
    advice = "export MASTER_ADDR, the name of that host, before mpirun"

    def is_here(self, variables: Variables) -> bool:
        """Whether both kinds of number are there: srun too sets the first one."""
        return self.rank in variables and self.local_rank in variables

    def job(self, variables: Variables, on_one_host: bool) -> str:
        """The number of this start: Intel MPI gives one, for MPICH on one host it is that of the common parent."""
        return variables.get("I_MPI_HYDRA_UUID") or (_proxy() if on_one_host else "") or job_id(variables)

    def first_host(self, variables: Variables) -> Place | None:
        """The first host of the batch job."""
        return first_of_job(variables)


class Horovod(Numbering):
    """horovodrun, where it starts processes itself and not through MPI."""

    name = "horovodrun"
    rank = "HOROVOD_RANK"
    world = "HOROVOD_SIZE"
    local_rank = "HOROVOD_LOCAL_RANK"
    local_world = "HOROVOD_LOCAL_SIZE"
    advice = "export MASTER_ADDR, the name of that host, before horovodrun"

    def job(self, variables: Variables, on_one_host: bool) -> str:
        """Where horovodrun listens, which is its own place."""
        names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
        return " ".join(variables.get(name, "") for name in names).strip() or job_id(variables)

    def first_host(self, variables: Variables) -> Place | None:
        """The first host of the batch job, or else that of horovodrun."""
        address = variables.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        return first_of_job(variables) or (Place(address, "the host of horovodrun") if address else None)


def _proxy() -> str:
    """The number of the ancestor that is MPICH's; nothing where there is none."""
    process = os.getppid()
    while process > 1:
        try:
            name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            break
        if name == PROXY:
            return str(process)
        process = int(rest.split()[1])
    return ""
