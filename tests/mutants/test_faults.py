"""The list of planted faults fits the source, so that it cannot rot."""

from collections import Counter

import pytest

from tests.mutants.faults import FAULTS, Fault
from tests.mutants.run import stages, with_fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place_in_the_source_and_leaves_it_valid(fault: Fault):
    compile(with_fault(fault), fault.file, "exec")


def test_no_two_faults_have_the_same_name():
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_a_fault_without_its_text_is_named():
    fault = Fault("metrics", "nothing is as it was", "engine/step/step.py", "text that is not there", "")
    with pytest.raises(ValueError, match=r"'nothing is as it was': its text occurs 0 times in engine/step/step\.py"):
        with_fault(fault)


def test_the_tests_beside_a_fault_run_first_and_all_others_last():
    first, *_, last = stages(next(fault for fault in FAULTS if fault.file == "data/order.py"))
    assert first[0] == "tests/data/test_order.py"
    assert last[0] == "tests"
    assert "--ignore=tests/data/test_order.py" in last


def test_the_tests_of_a_folder_without_tests_of_its_own_are_those_of_the_folder_above():
    found = stages(next(fault for fault in FAULTS if fault.file == "parallel/environments/find.py"))
    assert any("tests/parallel/test_environment.py" in stage for stage in found)
