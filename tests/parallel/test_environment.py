"""Who a process is, from the variables of each launcher."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoscale.errors import UserError
from isoscale.parallel.environments.find import Environment, find
from isoscale.parallel.environments.schedulers import expand, expand_counts
from tests import warm

PLAIN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {**PLAIN, **LOCAL, "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}

STEP = {
    "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "3", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "n[4-6]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_JOB_NODELIST": "n[1-9]", "SLURM_TASKS_PER_NODE": "4(x9)",
}  # fmt: skip
SCRIPT = {
    "SLURM_JOB_ID": "812",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "106364929", "PMIX_RANK": "1",
}  # fmt: skip
APART = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
PALS = {
    "PALS_RANKID": "13", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1", "PALS_LOCAL_SIZE": "12", "PALS_APID": "7f",
    "PMI_SIZE": "24", "PMI_RANK": "13",
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_RANK": "6", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "6", "LSB_JOBID": "99",
}  # fmt: skip
HOROVOD = {
    "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "3", "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "41234",
}  # fmt: skip


def numbers(found: Environment) -> tuple[int | None, ...]:
    return found.rank, found.world, found.local_rank, found.local_world


def test_without_variables_a_process_is_alone():
    assert find({}) == Environment()
    assert (find({}).rank, find({}).world) == (0, 1)


def test_plain_variables_say_who_and_where():
    found = find(PLAIN)
    assert (found.rank, found.world, found.address, found.port) == (3, 8, "n1", 29500)
    assert (found.local_rank, found.local_world, found.store_runs) == (None, None, False)
    assert (find({**PLAIN, **LOCAL}).local_rank, find({**PLAIN, **LOCAL}).local_world) == (1, 2)


def test_a_world_of_one_needs_no_address():
    assert find({"RANK": "0", "WORLD_SIZE": "1"}).world == 1


def test_torchrun_may_host_the_store_and_counts_its_attempts():
    found = find({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (found.launcher, found.rank, found.store_runs, found.attempt) == ("torchrun", 3, True, "2")
    assert not find({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).store_runs


def test_ranks_of_our_own_launcher_know_whose_end_is_theirs():
    assert find({**PLAIN, **LOCAL, "ISOSCALE_LAUNCHER": "77"}).parent == 77
    assert find(PLAIN).parent is None
    assert find({"ISOSCALE_LAUNCHER": "77"}) == Environment(), "what a rank starts without ranks is alone"


def test_the_machine_of_a_rank_is_known_where_ranks_are_counted_through():
    assert [find({**PLAIN, **LOCAL}).node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert find(PLAIN).node_of(0) is None
    assert find({**PLAIN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}).node_of(0) is None, "dealt out in turns"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({**PLAIN, "RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8: ranks are counted from 0 to 7"),
        ({**PLAIN, "RANK": "one"}, "RANK is 'one', but must be a whole number of at least 0"),
        ({**PLAIN, "RANK": "-1"}, "RANK is '-1'"),
        ({**PLAIN, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but must be a whole number of at least 1"),
        ({**PLAIN, "MASTER_ADDR": ""}, "WORLD_SIZE is 8, but MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set: set them to the host of rank 0"),
        ({**PLAIN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**PLAIN, "MASTER_PORT": "70000"}, "ports end at 65535"),
        ({**PLAIN, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
        (
            {**STEP, "WORLD_SIZE": "8"},
            "WORLD_SIZE is 8, but SLURM_NTASKS is 6: run: unset WORLD_SIZE, or set both RANK",
        ),
        ({**STEP, "RANK": "0"}, "RANK is 0, but SLURM_PROCID is 5"),
        ({**STEP, "SLURM_PROCID": "6"}, "SLURM_PROCID is 6, but SLURM_NTASKS is 6"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[4-"}, "the list of hosts is 'n[4-', but should look like n[1-4,7],login"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK is 2, but OMPI_COMM_WORLD_SIZE is 2"),
        (
            {**OPEN_MPI, **APART},
            "Open MPI (mpirun) started 2 ranks on several hosts, but says nothing about where rank 0",
        ),
        ({**OPEN_MPI, **APART}, "mpirun -x MASTER_ADDR"),
        (HYDRA, "export MASTER_ADDR, the name of that host, before mpirun"),
        ({**HYDRA, "MASTER_PORT": "x"}, "export MASTER_ADDR"),
        ({"PALS_RANKID": "1"}, "PMI_SIZE is not: export WORLD_SIZE, the number of ranks, before mpiexec"),
        (PALS, "export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)"),
        (JSRUN, "jsrun started 12 ranks on several hosts"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(variables: dict[str, str], words: str):
    with pytest.raises(UserError) as refused:
        find(variables)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_step_of_slurm_meets_on_its_first_host():
    found = find(STEP)
    assert numbers(found) == (5, 6, 1, 2)
    assert (found.launcher, found.address, found.job, found.attempt) == ("srun", "n4", "812.3", "0")
    assert found.inferred_from == "SLURM_STEP_NODELIST=n[4-6]"
    assert found.hosts == ("n4", "n4", "n5", "n5", "n6", "n6")
    assert find({**STEP, "SLURM_RESTART_COUNT": "2"}).attempt == "2"


def test_a_step_of_slurm_on_one_host_needs_no_name():
    one = {**STEP, "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "6", "SLURM_STEP_NODELIST": "n4"}
    assert (find(one).address, find(one).inferred_from) == ("127.0.0.1", "")


def test_hosts_of_tasks_that_are_dealt_out_in_turns_are_not_guessed():
    assert find({**STEP, "SLURM_DISTRIBUTION": "cyclic"}).hosts == ()
    assert find({**STEP, "SLURM_NODEID": "1"}).hosts == ()


def test_what_a_person_sets_wins_over_slurm():
    assert find({**STEP, **PLAIN}).launcher == "the variables RANK and WORLD_SIZE"
    assert find({**STEP, "RANK": "0", "WORLD_SIZE": "1"}).world == 1, "a training of its own in each task"
    found = find({**STEP, "WORLD_SIZE": "6", "MASTER_ADDR": "n4-fast", "MASTER_PORT": "29500"})
    assert (found.rank, found.address, found.port, found.inferred_from) == (5, "n4-fast", 29500, "")


def test_the_script_of_a_slurm_job_is_alone_and_says_so():
    found = find(SCRIPT)
    assert found.world == 1 and found.note.startswith(
        "Slurm job 812 has 4 tasks, but this process was started without srun"
    )
    assert find({**SCRIPT, "SLURM_NTASKS": "1"}).note == ""
    shell = {**SCRIPT, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
    assert (find(shell).world, find(shell).note) == (1, ""), "an interactive shell is a step of one task"


@pytest.mark.slow
def test_steps_of_neighbouring_jobs_have_ports_of_their_own():
    ports = [
        find({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(70_000, 70_500)
        for step in range(60)
    ]
    assert len(set(ports)) == len(ports) and min(ports) >= 20000 and max(ports) <= 52767


def test_open_mpi_inside_slurm_is_believed_about_ranks_and_slurm_about_hosts():
    daemon = {**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3"}
    found = find({**daemon, **OPEN_MPI, **APART})
    assert numbers(found) == (1, 2, 0, 1)
    assert (found.launcher, found.address, found.inferred_from) == (
        "Open MPI (mpirun)",
        "n1",
        "the hosts of the Slurm job",
    )


def test_open_mpi_meets_where_mpirun_runs():
    assert (find(OPEN_MPI).address, find(OPEN_MPI).job) == ("127.0.0.1", "106364929")
    version_4 = {"OMPI_MCA_orte_hnp_uri": "1482489856.0;tcp://10.78.0.1,10.1.1.1:57477;tcp6://[fd00::2]:56175"}
    version_5 = {"PMIX_NAMESPACE": "prterun-node-a1-29106@1"}
    assert find({**OPEN_MPI, **APART, **version_4}).address == "10.78.0.1"
    assert find({**OPEN_MPI, **APART, **version_5}).address == "node-a1"
    assert find({**OPEN_MPI, **APART, **version_5}).inferred_from == "the host of mpirun"
    assert find({**OPEN_MPI, **APART, **version_5, "MASTER_ADDR": "b"}).address == "b"


def test_mpich_and_intel_mpi_tell_numbers_but_srun_with_pmi_is_slurm():
    assert numbers(find({**HYDRA, "MASTER_ADDR": "a"})) == (1, 2, 0, 1)
    assert find({**HYDRA, "MASTER_ADDR": "a", "I_MPI_HYDRA_UUID": "fa77"}).job == "fa77"
    assert find({**STEP, "PMI_RANK": "5", "PMI_SIZE": "6"}).launcher == "srun"


def test_pals_meets_on_the_first_host_of_the_job(tmp_path: Path):
    (tmp_path / "nodes").write_text("x1\nx2\n")
    found = find({**PALS, "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert numbers(found) == (13, 24, 1, 12) and (found.address, found.job) == ("x1", "7f")
    with pytest.raises(UserError, match="export MASTER_ADDR"):
        find({**PALS, "PBS_NODEFILE": str(tmp_path / "missing")})
    without = {key: value for key, value in PALS.items() if key != "PMI_SIZE"}
    assert find({**without, "WORLD_SIZE": "24", "MASTER_ADDR": "x1"}).world == 24


def test_jsrun_meets_on_the_first_host_that_computes(tmp_path: Path):
    batch = {**JSRUN, "LSB_MCPU_HOSTS": "batch5 1 h41 42 h42 42"}
    assert numbers(find(batch)) == (6, 12, 0, 6) and find(batch).address == "h41"
    assert find({**JSRUN, "LSB_MCPU_HOSTS": "h41 42 h42 42"}).address == "h41"
    assert find({**JSRUN, "LSB_HOSTS": "h7 h7 h8 h8"}).address == "h7"
    (tmp_path / "ranks").write_text("batch5\nh9\nh9\nh10\nh10\n")
    assert find({**batch, "LSB_DJOB_RANKFILE": str(tmp_path / "ranks")}).address == "h9"


def test_horovodrun_tells_numbers_also_inside_a_step_of_slurm():
    assert numbers(find({**STEP, **HOROVOD})) == (3, 4, 3, 4)
    assert find(HOROVOD).address == "127.0.0.1"
    several = {**HOROVOD, "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"}
    assert (find(several).address, find(several).inferred_from) == ("10.0.0.1", "the host of horovodrun")
    assert find(several).port != find({**several, "HOROVOD_GLOO_RENDEZVOUS_PORT": "41235"}).port
    assert find({**OPEN_MPI, **HOROVOD}).launcher == "Open MPI (mpirun)", "horovodrun through MPI"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("n[1-3,7],login", "n1 n2 n3 n7 login"),
        ("gpu-[001-003]x", "gpu-001x gpu-002x gpu-003x"),
        ("n[8-11],m[08-11]", "n8 n9 n10 n11 m08 m09 m10 m11"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("rack-1-n4", "rack-1-n4"),
    ],
)
def test_lists_of_hosts_are_written_out(text: str, hosts: str):
    assert expand(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "n[", "n[1-", "n]1", "n[]", "n[3-1]", "n[a-b]", "n[1,,2]"])
def test_a_list_of_hosts_that_makes_no_sense_is_refused(text: str):
    with pytest.raises(UserError, match="the list of hosts is"):
        expand(text)


def test_counts_of_tasks_are_written_out():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("4") == [4] and expand_counts("") == []


PIECES = st.tuples(st.integers(0, 1200), st.integers(0, 12), st.integers(1, 4)).map(
    lambda found: f"{found[0]:0{found[2]}d}" + (f"-{found[0] + found[1]:0{found[2]}d}" if found[1] else "")
)
BRACKETS = st.lists(PIECES, min_size=1, max_size=3).map(lambda pieces: f"[{','.join(pieces)}]")
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,4}[a-z])?", fullmatch=True)
ENTRIES = st.tuples(NAMES, BRACKETS | st.just(""), st.tuples(NAMES, BRACKETS).map("".join) | st.just("")).map("".join)


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol: apt-get install slurm-client")
@settings(max_examples=60)
@given(st.lists(ENTRIES, min_size=1, max_size=4).map(",".join))
def test_lists_of_hosts_are_written_out_as_slurm_does(tmp_path_factory: pytest.TempPathFactory, text: str):
    configuration = tmp_path_factory.getbasetemp() / "slurm.conf"
    configuration.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=all Nodes=n1\n")
    variables = {"SLURM_CONF": str(configuration), "PATH": "/usr/bin:/bin"}
    done = warm.run(["scontrol", "show", "hostnames", text], env=variables, capture_output=True, text=True, check=True)
    assert expand(text) == done.stdout.split()
