"""The job that a process is part of, from the variables of its scheduler."""

import time

import pytest

from isoscale.parallel.environments.batch import batch_end, batch_job


@pytest.mark.parametrize(
    ("variables", "words", "cancel", "restarts", "login"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_SUBMIT_HOST": "login1"}, "Slurm job 7", "scancel 7",
         2, "login1"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "Slurm job 7_2", "scancel 7_2",
         0, ""),
        ({"PBS_JOBID": "7[2].server", "PBS_O_HOST": "login2"}, "PBS job 7[2].server", "qdel '7[2].server'", 0,
         "login2"),
        ({"LSB_JOBID": "7"}, "LSF job 7", "bkill 7", 0, ""),
    ],
)  # fmt: skip
def test_a_job_is_named_with_the_command_that_ends_it(
    variables: dict[str, str], words: str, cancel: str, restarts: int, login: str
):
    job = batch_job(variables)
    assert job is not None
    assert (str(job), job.cancel, job.restarts, job.login) == (words, cancel, restarts, login)


def test_outside_of_a_job_there_is_none():
    assert batch_job({}) is None and batch_end({}) is None
    assert batch_job({"SLURM_JOB_ID": "", "SLURM_RESTART_COUNT": "x"}) is None


def test_the_end_of_a_job_is_what_its_scheduler_says():
    end = int(time.time()) + 100
    assert batch_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(end)}) == end
    assert batch_end({"PBS_JOBID": "7"}) is None
