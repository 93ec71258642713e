import pytest

from isoscale.errors import UserError
from isoscale.recipe.load import load_recipe
from isoscale.recipe.problems import RecipeError


def problems_of(source, overrides=(), **options):
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides, **options)
    assert isinstance(caught.value, UserError)
    return [str(problem) for problem in caught.value.problems]


def one(source, **options):
    (problem,) = problems_of(source, **options)
    return problem.removeprefix("Python call: ")


def test_an_unknown_key_says_file_line_and_the_nearest_key(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("extends: images/digits\n\noptimiser:\n  lr: 1\n")
    assert problems_of(path) == [f'{path}:3: optimiser: unknown key; did you mean "optimizer"?']


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"train": {"epoch": 1}}, 'train.epoch: unknown key; did you mean "epochs"?'),
        ({"train": {"xyz": 1}}, "train.xyz: unknown key"),
        ({"lr": 1}, 'lr: unknown key; did you mean "optimizer.lr"?'),
        ({"train": {"epochs": "ten"}}, 'train.epochs: expected a whole number, found "ten"'),
        ({"train": {"epochs": 0}}, "train.epochs: expected a number of at least 1, found 0"),
        ({"train": {"epochs": 1.5}}, "train.epochs: expected a whole number, found 1.5"),
        ({"train": {"clip": [1]}}, "train.clip: expected a number, found a list of 1"),
        ({"train": 3}, "train: expected a section of keys and values, found 3"),
        ({"task": None}, "task: expected a section of keys and values, found null"),
        ({"name": 3}, "name: expected text, found 3"),
        ({"data": {"drop_last": "maybe"}}, 'data.drop_last: expected true or false, found "maybe"'),
        ({"data": {"transforms": "flatten"}}, 'data.transforms: expected a list, found "flatten"'),
        (
            {"schedule": {"name": "cosin"}},
            "schedule.name: expected constant, cosine, exponential, step, linear, onecycle or plateau, "
            'found "cosin"; did you mean "cosine"?',
        ),
        ({"train": {"limit_val_batches": "x"}}, 'train.limit_val_batches: expected a number, found "x"'),
        (
            {"train": {"limit_val_batches": -1}},
            "train.limit_val_batches: expected a number of at least 1 or a number above 0, found -1",
        ),
        ({"parallel": {"shards": "aut"}}, "parallel.shards: expected a whole number or auto, found "
            '"aut"; did you mean "auto"?'),
        ({"train": {"early_stopping": {"patiense": 3}}},
            'train.early_stopping.patiense: unknown key; did you mean "patience"?'),
        ({"task": {"init_from": {"runn": "x"}}}, 'task.init_from.runn: unknown key; did you mean "run"?'),
        ({"task": {"init_from": {}}}, "task.init_from.run: needed here, but missing"),
        ({"task": {"init_from": 3}}, "task.init_from: expected text or a section of keys and values, found 3"),
        (
            {"train": {"loss_weights": {"float": "x"}}},
            'train.loss_weights.float: expected a number or a section of keys and values, found "x"',
        ),
        ({"train": {"loss_weights": {"a": {"start": "x", "end": 1}}}},
            'train.loss_weights.a.start: expected a number, found "x"'),
        ({"schedule": {"scale": "sqrt"}},
            "schedule: scale: sqrt needs base_batch_size, the batch for which the lr was chosen"),
        ({"train": {"epochs": None}}, "train: training would never end: set epochs or steps"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_problem_in_plain_words(source, expected):
    assert one(source) == expected


def test_a_bad_cadence_shows_the_accepted_forms():
    assert 'write "1 epoch", "500 steps"' in one({"checkpoint": {"every": "2 fortnights"}})


def test_five_mistakes_of_different_kinds_are_five_problems(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "optimiser: {lr: 1}\n"
        "task:\n"
        "  class: tests.recipe.things.Science\n"
        "  model: {class: tests.recipe.things.Nett, widths: [1]}\n"
        "data:\n"
        "  class: tests.recipe.things.Samples\n"
        "  pth: x\n"
        "train: {epochs: ten}\n"
    )
    problems = problems_of(path, ["schedule.name=cosin"], check_components=True)
    assert len(problems) == 5
    text = "\n".join(problems)
    assert f'{path}:1: optimiser: unknown key; did you mean "optimizer"?' in text
    assert f'{path}:4: task.model.class: tests.recipe.things has no "Nett"; did you mean "Net"?' in text
    assert f'{path}:7: data.pth: Samples takes no such argument; did you mean "path"?' in text
    assert f'{path}:8: train.epochs: expected a whole number, found "ten"' in text
    assert "command line: schedule.name: expected constant" in text


def test_a_key_written_twice_and_other_mistakes_come_together(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("seed: 1\nseed: 2\ntrain: {epoch: 1}\n1: x\n")
    assert len(problems_of(path, ["~nothing", "train.clip=x"])) == 5


def test_a_misspelt_section_is_not_also_missing_its_arguments():
    source = {
        "tsak": {"class": "tests.recipe.things.Science", "model": "x"},
        "data": {"class": "tests.recipe.things.Anything"},
    }
    assert problems_of(source, check_components=True) == ['Python call: tsak: unknown key; did you mean "task"?']


def test_many_problems_are_counted_and_one_is_not():
    with pytest.raises(RecipeError, match=r"^2 problems in the recipe:\n"):
        load_recipe({"a": 1, "b": 2})
    with pytest.raises(RecipeError, match=r"^Python call: a: unknown key$"):
        load_recipe({"a": 1})
