"""One report of many hosts: what all have in common once, what differs with the names of the hosts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from isoscale.observe.doctor.finding import Finding, span

MOST_NAMES = 8
VERSIONS = ("isoscale", "torch", "Python")

Report = tuple[str, Sequence[Finding]]
"""A host and what was found there."""


def merge(reports: Sequence[Report]) -> Iterator[Finding]:
    """The findings of all hosts, by subject in the order of the first one."""
    all_hosts = {host for host, _ in reports}
    groups: dict[Finding, list[tuple[str, Finding]]] = {}
    for host, findings in reports:
        for finding in findings:
            groups.setdefault(replace(finding, amounts=()), []).append((host, finding))
    subjects = list(dict.fromkeys(alike.subject for alike in groups))
    for alike in sorted(groups, key=lambda finding: subjects.index(finding.subject)):
        yield _merged(groups[alike], all_hosts)


def _merged(found: Sequence[tuple[str, Finding]], all_hosts: set[str]) -> Finding:
    hosts = list(dict.fromkeys(host for host, _ in found))
    first = found[0][1]
    amounts = [[(finding.amounts[place], host) for host, finding in found] for place in range(len(first.amounts))]
    spans = [span(min(each, key=_value), max(each, key=_value)) for each in amounts]
    where = "" if set(hosts) == all_hosts else names(hosts)
    return replace(first, text=", ".join([first.text, *spans]), amounts=(), host=where)


def _value(found: tuple[object, str]) -> float:
    return getattr(found[0], "value", 0.0)


def versions(of_ranks: Sequence[tuple[str, Sequence[str]]]) -> Iterator[Finding]:
    """A problem for each of isoscale, torch and Python that differs; given for every rank, with its host."""
    for place, name in enumerate(VERSIONS):
        hosts: dict[str, list[str]] = {}
        for host, found in of_ranks:
            hosts.setdefault(found[place], []).append(host)
        if len(hosts) > 1:
            text = ", ".join(f"{version} on {names(dict.fromkeys(where))}" for version, where in hosts.items())
            advice = "let all ranks use one installation: activate the same environment in the job script"
            yield Finding("versions", "problem", f"{name} differs between ranks: {text}", advice)


def names(hosts: Iterable[str]) -> str:
    """Hosts in words, not more of them than people read."""
    listed = list(hosts)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(listed[:MOST_NAMES]) + more
