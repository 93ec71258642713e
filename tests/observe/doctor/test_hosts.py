from dataclasses import asdict

from isoscale.observe.doctor.finding import Amount, Finding
from isoscale.observe.doctor.hosts import merge, names, versions


def step(milliseconds: float) -> Finding:
    return Finding("training step", "ok", "cpu", amounts=(Amount(milliseconds, "ms"),))


def test_what_all_hosts_have_in_common_is_said_once_and_what_differs_with_the_host():
    torch, memory = Finding("torch", "ok", "2.11"), Finding("memory", "ok", "16 GiB")
    little = Finding("memory", "warning", "1 GiB", "ask for more")
    found = list(merge([("n1", [torch, memory]), ("n2", [torch, little]), ("n3", [torch, memory])]))
    assert [(each.verdict, each.host, each.text) for each in found] == [
        ("ok", "", "2.11"), ("ok", "n1, n3", "16 GiB"), ("warning", "n2", "1 GiB"),
    ]  # fmt: skip


def test_what_was_measured_goes_from_the_least_to_the_most_with_their_hosts():
    (found,) = merge([("n1", [step(2)]), ("n2", [step(1.5)]), ("n3", [step(120.4)])])
    assert found.text == "cpu, 1.5 (n2) to 120 (n3) ms" and found.host == ""
    (same,) = merge([("n1", [step(2.001)]), ("n2", [step(2)])])
    assert same.text == "cpu, 2 ms"


def test_findings_of_one_subject_stand_together_in_the_order_of_the_first_host():
    one, two, three = (Finding(name, "ok", "") for name in ("one", "two", "three"))
    other = Finding("one", "problem", "bad")
    found = [each.subject for each in merge([("n1", [one, two]), ("n2", [other, three, two])])]
    assert found == ["one", "one", "two", "three"]


def test_versions_that_differ_are_a_problem_with_their_hosts():
    assert list(versions([("n1", ["1", "2", "3"]), ("n2", ["1", "2", "3"])])) == []
    (found,) = versions([("n1", ["1", "2", "3"]), ("n1", ["1", "2", "3"]), ("n2", ["1", "2.1", "3"])])
    assert found.verdict == "problem" and found.text == "torch differs between ranks: 2 on n1, 2.1 on n2"


def test_many_hosts_are_counted():
    assert names(f"n{number}" for number in range(11)) == "n0, n1, n2, n3, n4, n5, n6, n7 and 3 more"


def test_a_finding_travels_as_words():
    assert Finding.read(asdict(step(3))) == step(3)
