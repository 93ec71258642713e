import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_equal_is_code_0_not_equal_is_1_and_impossible_is_2(isoscale, copied):
    run = copied()
    shown = isoscale("reproduce", str(run), "--steps", "23")
    assert shown.code == 0 and shown.out.splitlines()[0].split() == ["step", "name", "recorded", "reproduced", "equal"]
    assert shown.out.splitlines()[-1].startswith("reproduced: all ")
    recipe = Path(run, "recipe.yaml")
    recipe.write_text(recipe.read_text().replace("seed: 0", "seed: 1"))
    shown = isoscale("reproduce", str(run))
    assert shown.code == 1 and shown.out.splitlines()[-1].startswith("not reproduced: ")
    refused = isoscale("reproduce", str(run), "--steps", "1")
    assert refused.code == 2 and "nothing was logged up to step 1" in refused.err and not refused.out


def test_programs_get_json(isoscale, copied):
    found = json.loads(isoscale("reproduce", str(copied()), "--json").out)
    assert found["equal"] is True and found["tolerance"] == 0 and found["values"][0]["equal"] is True
