"""What a job asks for, its script and bad input; nothing is submitted here."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isoscale.errors import UserError
from isoscale.launch.config import Resources, examples, merged, notice, read_profile, resources
from isoscale.launch.schedulers.slurm import Slurm
from isoscale.launch.submission import plan
from isoscale.recipe.launch import Launch, time_seconds
from isoscale.runs import attempts as attempts
from isoscale.runs.run import Run
from tests import warm
from tests.cli.conftest import isoscale
from tests.helpers import command, train
from tests.science.potentials.deepmd.made_input import write

__all__ = ["isoscale"]


@pytest.fixture(autouse=True)
def _no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def profile(folder: Path, name: str, text: str) -> None:
    path = folder / "config/isoscale/clusters" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def script(**options: object) -> str:
    return Slurm().script(plan("images/digits", [], options).job)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(90, 5400), ("90", 5400), ("5:30", 330), ("01:00:00", 3600), ("1-12", 129600), ("1-02:03", 93780),
     ("1-02:03:04", 93784)],
)  # fmt: skip
def test_times_are_read_as_slurm_reads_them(text: int | str, seconds: int):
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("asked", "total", "counted"),
    [({}, None, (1, 1, 0)), ({"nodes": 2, "tasks_per_node": 3}, None, (2, 3, 0)),
     ({"nodes": 2, "gpus_per_node": 4}, None, (2, 4, 4)), ({"gpus_per_node": 4}, 8, (2, 4, 4)),
     ({"gpus_per_node": 4}, 2, (1, 2, 2)), ({"gpus_per_node": 4}, 6, (2, 3, 3)),
     ({"nodes": 4, "gpus_per_node": 4}, 8, (4, 2, 2)), ({"nodes": 2}, 8, (2, 4, 4))],
)  # fmt: skip
def test_gpus_are_spread_over_nodes(asked: dict, total: int | None, counted: tuple[int, int, int]):
    assert resources(Launch(**asked), total) == Resources(*counted)


@pytest.mark.parametrize(
    ("asked", "total", "said"),
    [({"gpus_per_node": 2}, 3, "use -n 2 or -n 4"), ({"nodes": 3}, 4, "use -n 3 or -n 6"), ({}, 4, "--gpus-per-node"),
     ({"nodes": 2, "gpus_per_node": 2}, 8, "8 GPUs"), ({"gpus_per_node": 1, "tasks_per_node": 2}, None, "one GPU")],
)  # fmt: skip
def test_impossible_resources_are_refused_with_possible_ones(asked: dict, total: int | None, said: str):
    with pytest.raises(UserError, match=said):
        resources(Launch(**asked), total)


def test_later_layers_win_and_variables_are_merged():
    found = merged(
        {"nodes": 1, "time": 5, "env": {"A": "1"}}, {"nodes": 2, "env": {"B": 2}}, {"nodes": 3, "time": None}
    )
    assert (found.nodes, found.time, found.env) == (3, 5, {"A": "1", "B": 2})


def test_options_win_over_the_profile_and_the_profile_over_the_recipe(tmp_path: Path, isoscale):
    profile(tmp_path, "mine", "partition: gpu\naccount: theirs\ntime: 30\n")
    (tmp_path / "own.yaml").write_text("extends: images/digits\nlaunch: {partition: cpu, qos: low, time: 10}\n")
    shown = isoscale("submit", "own.yaml", "--cluster", "mine", "--account", "ours", "--dry-run")
    assert shown.code == 0
    for line in ("--partition=gpu", "--account=ours", "--qos=low", "--time=30"):
        assert f"#SBATCH {line}\n" in shown.out
    assert not (tmp_path / "runs").exists()


def test_the_script_is_valid_and_has_one_srun_line(tmp_path: Path):
    text = script(nodes=2, tasks_per_node=2, cpus_per_task=3, time="01:00:00", modules=["cuda/12"], env={"A": "b 'c'"})
    assert warm.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert [line for line in text.splitlines() if line.startswith("srun")] == [
        f"srun {shlex.quote(str(Path(sys.executable).parent / 'isoscale'))} train --run runs/digits-$SLURM_JOB_ID"
    ] or "srun isoscale train --run runs/digits-$SLURM_JOB_ID\n" in text
    for line in ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=3", "--output=runs/digits-%j/slurm/%j.out"):
        assert f"#SBATCH {line}\n" in text
    for line in ("--open-mode=append", "--requeue", "--signal=USR1@120"):
        assert f"#SBATCH {line}  " in text
    assert "module load cuda/12\n" in text and "export A='b '\"'\"'c'\"'\"''\n" in text


def test_every_start_of_a_job_makes_a_secret_of_its_own_that_is_not_in_its_script():
    (line,) = [line for line in script().splitlines() if "ISOSCALE_SECRET" in line]
    made = [warm.run(["bash", "-c", f'{line}\necho "$ISOSCALE_SECRET"'], capture_output=True, text=True) for _ in "ab"]
    secrets = {done.stdout.strip() for done in made}
    assert len(secrets) == 2 and all(re.fullmatch("[0-9a-f]{64}", each) and each not in line for each in secrets)


@pytest.mark.parametrize(
    ("container", "words"),
    [("apptainer:my.sif", "srun apptainer exec --nv my.sif isoscale train"),
     ("shifter:me/image:1", "srun shifter --image=me/image:1 isoscale train"),
     ("podman:me/image", "srun podman run --rm")],
)  # fmt: skip
def test_a_container_stands_around_the_command(container: str, words: str):
    text = script(container=container, gpus_per_node=2)
    assert words in text and " isoscale train --run runs/digits-$SLURM_JOB_ID\n" in text


def run_script(text: str, folder: Path, train_code: int, restarts: str | None = None) -> tuple[int, str]:
    """Run a job script where srun and scontrol only write down how they were called."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, code in (("srun", train_code), ("scontrol", 0), ("apptainer", 0)):
        (programs / name).write_text(f'#!/bin/bash\necho {name} "$@" >>{folder}/calls\nexit {code}\n')
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    variables |= {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    done = warm.run(["bash"], input=text, text=True, env=variables, cwd=folder)
    return done.returncode, (folder / "calls").read_text()


@pytest.mark.parametrize(
    ("train_code", "restarts", "code", "requeued"),
    [(0, None, 0, False), (75, None, 0, True), (75, "4", 0, True), (75, "5", 75, False), (2, None, 2, False)],
)
def test_only_a_training_that_was_stopped_starts_again(
    tmp_path: Path, train_code: int, restarts: str | None, code: int, requeued: bool
):
    found, calls = run_script(script(max_requeues=5), tmp_path, train_code, restarts)
    assert found == code and ("scontrol requeue 7" in calls) == requeued
    assert "train --run runs/digits-7\n" in calls


def test_a_directory_with_blanks_and_percents_is_one_word(tmp_path: Path):
    text = Slurm().script(plan(None, [], {}, run=Path("my runs/100%j")).job)
    assert '#SBATCH --output="my runs/100%%j/slurm/%j.out"' in text
    assert "train --run my runs/100%j\n" in run_script(text, tmp_path, 0)[1]


def test_a_continued_run_gets_the_words_and_a_new_one_its_recipe(tmp_path: Path):
    train(tmp_path / "runs/there", train__epochs=1)
    text = Slurm().script(plan(None, ["train.epochs=2"], {}, run=Path("runs/there"), words=["--profile"]).job)
    assert " train train.epochs=2 --profile --run runs/there\n" in text
    assert " train --run runs/digits-$SLURM_JOB_ID\n" in Slurm().script(
        plan("images/digits", ["train.epochs=2"], {}).job
    )


def test_options_of_train_reach_train(isoscale):
    said = ("--profile", "--log-level", "debug", "--log-format", "json", "--log", "collect", "--log-file", "a b.log")
    shown = isoscale("submit", "images/digits", *said, "--dry-run")
    (line,) = [line for line in shown.out.splitlines() if line.startswith("srun ")]
    assert shlex.split(line)[3:-2] == list(said), line


def test_notice_of_the_time_limit_leaves_time_to_train():
    assert notice(Launch()) == 120 and notice(Launch(time=60)) == 120 and notice(Launch(time=2)) == 30
    assert notice(Launch(time=10, notice=300)) == 300
    with pytest.raises(UserError, match="at most 150"):
        notice(Launch(time=5, notice=200))


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--time", "soon"), '"soon" is not a time'), (("--time", "0"), "no time at all"), (("--nodes", "0"), "nodes"),
     (("--container", "docker:x"), "apptainer:IMAGE"), (("--env", "A"), "--env A"), (("--env", "1=2"), "not the name"),
     (("--directive", "exclusive"), "--exclusive"), (("--cluster", "nowhere"), "perlmutter"),
     (("-n", "3", "--gpus-per-node", "2"), "-n 4"), (("--account", "a\nb"), "one line"),
     (("--nots",), "No such option")],
)  # fmt: skip
def test_bad_input_is_refused_in_words(isoscale, words: tuple[str, ...], said: str):
    refused = isoscale("submit", "images/digits", *words, "--dry-run")
    assert refused.code == 2 and refused.out == "" and "Traceback" not in refused.err
    assert said in refused.err.replace("\n", " ") or said in refused.err


def test_all_mistakes_of_a_profile_are_named_with_their_lines(tmp_path: Path, isoscale):
    profile(tmp_path, "mine", "partition: gpu\nacount: me\ntime: never\n")
    refused = isoscale("submit", "--cluster", "mine", "--dry-run")
    assert refused.code == 2
    assert 'mine.yaml:2: acount: unknown key; did you mean "account"?' in refused.err
    assert 'mine.yaml:3: time: "never" is not a time' in refused.err


@pytest.mark.parametrize("name", ["submit", "status", "cancel", "logs"])
def test_every_command_explains_itself(isoscale, name: str):
    assert f"Usage: isoscale {name}" in isoscale(name, "--help").out


@pytest.mark.parametrize("name", sorted(examples()))
def test_every_example_is_a_profile(tmp_path: Path, name: str):
    profile(tmp_path, name, examples()[name].read_text())
    assert Slurm().script(plan(None, [], {}, cluster=name).job)


def test_an_example_has_four_gpus_a_node(tmp_path: Path):
    profile(tmp_path, "perlmutter", examples()["perlmutter"].read_text())
    assert read_profile("perlmutter")["gpus_per_node"] == 4
    assert plan(None, [], {}, cluster="perlmutter", num_gpus=8).job.resources == Resources(2, 4, 4)


def test_without_slurm_the_user_is_told(isoscale, monkeypatch):
    monkeypatch.setenv("PATH", "")
    refused = isoscale("submit", "images/digits")
    assert refused.code == 2 and "no Slurm on this machine" in refused.err and "--dry-run" in refused.err


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path, isoscale):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    refused = isoscale("submit", "--run", "full", "--dry-run")
    assert refused.code == 2 and "holds no run" in refused.err


def test_the_ledger_has_every_start(tmp_path: Path):
    first = train(tmp_path / "a", train__epochs=1)
    train(tmp_path / "a", train__epochs=2)
    begun, continued = first.record["stretches"]
    assert (begun["first_step"], begun["last_step"], begun["status"], begun["job"]) == (0, 23, "done", None)
    assert (continued["first_step"], continued["last_step"], continued["ranks"]) == (23, 46, 1)
    assert continued["device_hours"] > 0 and continued["peak_memory"] > 0 and continued["ended"]


def test_a_stretch_that_never_ended_was_killed():
    variables = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    ledger = attempts.begun(attempts.begun([], 0, ["a"], {}), 5, ["a", "a", "b"], variables)
    assert [entry["status"] for entry in ledger] == ["killed", "running"]
    assert (ledger[1]["job"], ledger[1]["restart"], ledger[1]["hosts"], ledger[1]["ranks"]) == ("7", 1, ["a", "b"], 3)
    assert attempts.ended(ledger, "done", 9, 1200.0, 1)[1]["device_hours"] == 1.0


def test_a_local_run_is_shown_stopped_and_read(tmp_path: Path, isoscale):
    run = train(Path("runs/a"), train__epochs=1)
    shown = isoscale("status", "a")
    assert shown.code == 0 and "done, step 23 of 23" in shown.out and "device hours" in shown.out
    assert "job" not in shown.out.splitlines()[1]
    assert isoscale("logs", "a").out == (run.path / "log.txt").read_text()
    refused = isoscale("cancel", "a")
    assert refused.code == 2 and "nothing trains in runs/a: it is done" in refused.err


@pytest.mark.parametrize("name", ["status", "cancel", "logs"])
def test_a_run_that_is_not_there_is_refused(isoscale, name):
    refused = isoscale(name, "nowhere")
    assert refused.code == 2 and refused.err.startswith("error: ") and "nowhere" in refused.err and refused.out == ""


@pytest.mark.slow
def test_a_training_on_this_machine_is_cancelled_by_asking_it_to_stop(tmp_path: Path, isoscale):
    words = command("train", "train.epochs=100000", "observe.tensorboard=0", "--run", "runs/a")
    process = warm.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (tmp_path / "runs/a/metrics.jsonl").exists() and "running" in isoscale("status", "a").out)
        said = isoscale("cancel", "a")
        assert said.code == 0 and "asked the training in runs/a to stop" in said.out
        assert process.wait(timeout=60) == 75
    finally:
        process.kill()
    assert "stopped by the file STOP" in isoscale("status", "a").out


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_other_resources_are_no_reason_to_refuse_a_run(tmp_path: Path):
    train(tmp_path / "a", train__epochs=1, launch__nodes=1)
    assert train(tmp_path / "a", train__epochs=1, launch__nodes=2, launch__time="10").status == "done"


def test_a_run_that_waits_for_its_job_is_listed(tmp_path: Path, isoscale, monkeypatch):
    monkeypatch.setattr(Slurm, "submit_held", lambda self, text: "7")
    monkeypatch.setattr(Slurm, "release", lambda self, job: None)
    monkeypatch.setattr(Slurm, "expected_start", lambda self, job: "2030-01-01 00:00:00")
    sent = isoscale("submit", "images/digits", "train.epochs=1", "--time", "90")
    assert "submitted job 7: 1 node × 1 task, at most 1:30:00 per start" in sent.out
    assert "expected at 2030-01-01 00:00:00" in sent.out
    assert "digits-7  submitted" in isoscale("runs", "list").out
    assert isoscale("runs", "show").code == 0
    trained = isoscale("train", "--run", "runs/digits-7")
    assert trained.code == 0 and "continues" not in trained.out
    record = Run("runs/digits-7").record
    assert record["command"][-1] == "runs/digits-7" and record["started"] and record["job"]["id"] == "7"
    assert "digits-7  done" in isoscale("runs", "list").out


def test_a_job_that_cannot_be_prepared_is_cancelled(tmp_path: Path, isoscale, monkeypatch):
    cancelled: list[str] = []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/digits-7").touch()
    monkeypatch.setattr(Slurm, "submit_held", lambda self, text: "7")
    monkeypatch.setattr(Slurm, "cancel", lambda self, job: cancelled.append(job))
    assert isoscale("submit", "images/digits").code == 2
    assert cancelled == ["7"]


def test_an_input_of_another_program_speaks_of_the_ranks_of_the_job(tmp_path: Path):
    found = plan(str(write(tmp_path)), [], {"nodes": 2, "tasks_per_node": 2, "activate": "true"})
    assert found.loaded.recipe.data.batch_size == 4
