"""Words of a recipe, an option or a file name that try to be commands: bash and Slurm must see words alone."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isoscale.errors import UserError
from isoscale.launch import quoting
from isoscale.launch.config import Resources, merged
from isoscale.launch.job import Array, Job
from isoscale.launch.schedulers.slurm import Slurm
from isoscale.launch.status import Standing
from isoscale.launch.submission import plan
from isoscale.recipe.problems import RecipeError
from isoscale.runs.run import Run
from isoscale.study.scale.job import Request
from isoscale.study.scale.study import Study
from tests import warm
from tests.cli.conftest import isoscale
from tests.helpers import train

__all__ = ["isoscale"]

PROGRAMS = ("srun", "module", "scontrol", "isoscale", "activate-it")
RECORDER = """#!/bin/sh
printf '%s\\0' "$#" "${0##*/}" "$@" "$GIVEN" >>"$CALLS"
"""
PIECES = ["\n", "\r", "\t", " ", '"', "'", "\\", "#", "$(touch canary)", "`touch canary`", ";touch canary;", "&", "|",
          "<", ">canary", "${IFS}", "$HOME", "!!", "*", "?", "~", "{a,b}", "-", "--uid=0", "#SBATCH --uid=0",
          "\n#SBATCH --uid=0\n", "%", "%j", "=", ",", "(", ")", "[", "\0", "\x1b[2J", "\u2028", "\udcff", "é", "名",
          "b c", "\\\n", "\ntouch canary\n", "'\ntouch canary\n'", '"; touch canary; "', "EOF"]  # fmt: skip
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join) | st.text(min_size=1, max_size=12)
KEYS = ("account", "partition", "qos", "constraint", "reservation", "gres", "mem", "mail_user", "mail_type")
HARMLESS = {"name": "digits", "folder": "runs/digits", "word": "train.epochs=1", "env": "1", "module": "cuda",
            "image": "", "option": "", "value": "ours", "activate": "activate-it here"}  # fmt: skip


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs that only write down how they were called, and no others to find."""
    folder = tmp_path_factory.mktemp("sandbox")
    (folder / "bin").mkdir()
    for name in (*PROGRAMS, "touch", "apptainer", "podman", "shifter"):
        (folder / "bin" / name).write_text(RECORDER)
        (folder / "bin" / name).chmod(0o755)
    for name in ("od", "tr"):  # which make the secret of a job
        (folder / "bin" / name).symlink_to(shutil.which(name) or name)
    return folder


def job(array: bool = False, **given: str) -> Job:
    """A job with one word of somebody else's in each place."""
    said = {**HARMLESS, **given}
    launch = merged(
        {"env": {"GIVEN": said["env"]}, "modules": [said["module"]], "activate": said["activate"], "time": 10,
         **dict.fromkeys(KEYS, said["value"]),
         **({"container": f"podman:{said['image']}"} if said["image"] else {}),
         **({"directives": [said["option"]]} if said["option"] else {})}
    )  # fmt: skip
    return Job(
        said["name"], said["folder"], False, [said["word"]], "isoscale", launch, Resources(1, 1, 0),
        shlex.join(["isoscale", "submit", said["name"]]), Array([0]) if array else None,
    )  # fmt: skip


def calls_of(script: str, sandbox: Path) -> list[list[str]]:
    """What a script starts, each with its arguments and the variable GIVEN."""
    (sandbox / "calls").write_text("")
    variables = {"PATH": str(sandbox / "bin"), "CALLS": str(sandbox / "calls"), "SLURM_JOB_ID": "7", "HOME": "/nowhere"}
    done = subprocess.run(
        ["/bin/bash"], input=script.encode(), cwd=sandbox, env=variables, capture_output=True, timeout=30
    )
    assert done.returncode == 0 and not done.stderr, (done, script)
    assert sorted(path.name for path in sandbox.iterdir()) == ["bin", "calls"], script
    words, calls = (sandbox / "calls").read_bytes().decode().split("\0")[:-1], []
    while words:
        end = int(words[0]) + 3
        calls.append(words[1:end])
        words = words[end:]
    return calls


def directives_of(script: str) -> list[list[str]]:
    """The options on each #SBATCH line, as Slurm reads them: it stops at the first line that is a command."""
    found = []
    for text in script.split("\n"):
        if text.startswith("#SBATCH"):
            found.append(slurm_words(text.removeprefix("#SBATCH")))
        elif text and not text.startswith("#"):
            break
    return found


def slurm_words(line: str) -> list[str]:
    """Words behind #SBATCH as sbatch takes them apart: quotes anywhere, \\ before any sign, # ends the line."""
    words: list[str] = []
    word, quote, signs = None, "", iter(line)
    for sign in signs:
        if sign == "\\":
            word = (word or "") + next(signs, "")
        elif quote:
            quote, word = ("", word) if sign == quote else (quote, (word or "") + sign)
        elif sign in "\"'":
            quote, word = sign, word or ""
        elif sign == "#":
            break
        elif sign.isspace():
            words, word = (words, None) if word is None else ([*words, word], None)
        else:
            word = (word or "") + sign
    assert not quote, line
    return words if word is None else [*words, word]


def made(**given: str) -> str | None:
    """The script, or None where a word was refused in words of a UserError or of the recipe's own checks."""
    try:
        return Slurm().script(job(**given))
    except (UserError, RecipeError):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("place", [place for place in HARMLESS if place not in ("option", "activate")])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
def test_any_text_is_one_word_or_refused(sandbox: Path, place: str, text: str):
    check(sandbox, place, text)


@pytest.mark.full
@pytest.mark.parametrize("place", list(HARMLESS))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
def test_very_many_texts_are_one_word_or_refused(sandbox: Path, place: str, text: str):
    if place in ("option", "activate"):
        check_lines(sandbox, place, text)
    else:
        check(sandbox, place, text)


def check(sandbox: Path, place: str, text: str) -> None:
    """Every argument of every program, and every option of Slurm, is what was given."""
    said, script = {**HARMLESS, place: text}, made(**{place: text})
    if script is None:
        return
    train = ["isoscale", "train", said["word"], "--run", said["folder"]]
    if said["image"]:
        inside = ["podman", "run", "--rm", "--network=host", "--ipc=host", "--env-host",
                  f"--volume={sandbox}:{sandbox}", f"--workdir={sandbox}", said["image"]]  # fmt: skip
        train = [*inside, *train]
    assert calls_of(script, sandbox) == [
        ["module", "load", said["module"], ""], ["activate-it", "here", ""],
        ["srun", *train, said["env"]],
    ]  # fmt: skip
    asked = {words[0].partition("=")[0]: words for words in directives_of(script)}
    assert all(len(words) == 1 for words in asked.values()), script
    values = {name: words[0].partition("=")[2] for name, words in asked.items()}
    assert values["--job-name"] == said["name"]
    assert values["--output"] == f"{said['folder'].replace('%', '%%')}/slurm/%j.out"
    assert {values[f"--{key.replace('_', '-')}"] for key in KEYS} == {said["value"]}
    assert len(directives_of(script)) == len(asked) == len(directives_of(Slurm().script(job()))), script


def check_lines(sandbox: Path, place: str, text: str) -> None:
    """What is a line of options or of shell by itself says nothing about the lines after it."""
    script = made(**{place: f"--comment={text}" if place == "option" else f": {text}"})
    if script is None:
        return
    if place == "option":
        assert [words[0] for words in directives_of(script) if words[0].startswith("--comment=")]
        assert calls_of(script, sandbox) == calls_of(Slurm().script(job()), sandbox)
    assert "\nsrun isoscale train train.epochs=1 --run runs/digits\n" in script
    rest = script[script.index("#SBATCH --output") :]
    assert place == "activate" or rest == Slurm().script(job())[Slurm().script(job()).index("#SBATCH --output") :]


@pytest.mark.parametrize("place", ["name", "value", "env", "module", "word", "folder", "activate", "option"])
def test_a_second_line_is_refused_everywhere(place: str):
    assert made(**{place: "--x\ntouch canary"}) is None
    assert made(**{place: "--x\n#SBATCH --uid=0"}) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [(["--account", 'a" --uid="0'], "cannot stand in a job script"),
     (["--container", "podman:--privileged"], "not a container"),
     (["--container", "apptainer:-B/:/host"], "not a container"), (["--module", "--force"], "not the name of a module"),
     (["--directive", '--comment="a'], "a quote is not closed"),
     (["--activate", "conda activate 'x"], "not a complete line"), (["--activate", "true \\"], "not a complete line"),
     (['name="a\\nb"'], "cannot stand in a job script"),
     (["name='a\"b'"], "cannot stand in a job script")],
)  # fmt: skip
@pytest.mark.parametrize("command", ["submit", "sweep", "scale"])
def test_what_was_an_injection_is_refused(isoscale, tmp_path: Path, command: str, words: list[str], said: str):
    more = {"submit": [], "sweep": ["seed=0,1", "--slurm"], "scale": ["--ranks", "1", "--slurm"]}[command]
    done = isoscale(command, "images/digits", *words, *more, "--dry-run")
    assert done.code == 2 and said in " ".join(done.err.split()) and not done.out, done
    assert not list(tmp_path.iterdir())


def test_a_file_whose_name_is_a_command_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Path):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "$(touch canary); x.yaml"
    recipe.write_text("extends: images/digits\n")
    script = Slurm().script(plan(str(recipe), [], {}).job)
    program = next(text for text in script.splitlines() if text.startswith("srun ")).split()[1]
    assert calls_of(script, sandbox) == [
        ["srun", program, "train", "--run", "runs/$(touch canary); x-7", ""]
    ]  # fmt: skip


def test_the_steps_of_a_scaling_study_have_its_folder_as_one_word(sandbox: Path):
    request = Request(merged({"time": 10, "env": {"GIVEN": "1"}}), Resources(1, 2, 0))
    folder = "runs/$(touch canary) 'x'"
    study = Study(Path(folder), "a $(touch canary)", "strong", [1, 2], 1, None, 1, {"command": ["isoscale", "a\nb"]})
    found = calls_of(Slurm().script(request.job(study)), sandbox)
    assert [call[call.index("--run") + 1] for call in found] == [folder, folder]
    assert {call[0] for call in found} == {"srun"}


def test_a_sweep_names_its_points_itself(tmp_path: Path, isoscale):
    from isoscale.study.sweep.plan import Sweep
    from isoscale.study.sweep.plan import plan as plan_sweep

    sweep = plan_sweep("images/digits", ["seed=0,1"], ["isoscale", "sweep"]).write(tmp_path / "sweep")
    for name in ("../elsewhere", "/etc", "..", "a\nb"):
        record = {**sweep.record, "points": [{"directory": name, "values": {"seed": 0}}]}
        (tmp_path / "sweep/sweep.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match="is not a directory in it"):
            Sweep.read(tmp_path / "sweep")


def test_a_number_of_a_job_is_no_option_of_scancel(tmp_path: Path, isoscale, monkeypatch: pytest.MonkeyPatch):
    """`scancel --user=me` would end all jobs of the user."""
    called: list[Sequence[str]] = []
    run = train(tmp_path / "runs/a", train__epochs=1, data__subset=100).path
    record = json.loads((run / "run.json").read_text())
    for number in ("--user=me", "7 --user=me", ["--user=me"]):
        (run / "run.json").write_text(json.dumps({**record, "job": {"id": number}}))
        monkeypatch.setattr(Slurm, "ask", lambda self, *words, **others: called.append(words))
        assert Standing.of(Run(run)).job is None
        assert isoscale("cancel", str(run)).code == 2 and not called


def test_bash_takes_every_script_as_it_is_meant(sandbox: Path):
    harmless = Slurm().script(job(folder="runs/my run", value="a b#c", env="x 'y' \"z\" $HOME"))
    assert warm.run(["bash", "-n"], input=harmless, text=True).returncode == 0
    assert '#SBATCH --account="a b#c"' in harmless
    assert re.search(r"^sweep='runs/my run'$", Slurm().script(job(array=True, folder="runs/my run")), re.MULTILINE)
    assert os.linesep == "\n" and quoting.comment("a\nb\x1b[2J") == "a b?[2J"
