"""What `isoscale doctor` finds: on one host, and of several ranks one report for all hosts and the network between."""

import atexit
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from isoscale._version import __version__
from isoscale.data.files import data_folder
from isoscale.data.tools.published import presence
from isoscale.errors import USER_CAN_FIX, UserError
from isoscale.launch.schedulers.find import schedulers
from isoscale.observe.doctor.checks import accelerators, device_words, examine, step_on
from isoscale.observe.doctor.finding import Finding
from isoscale.observe.doctor.folders import folder, leave_mark, remove_mark, sees_mark, shared
from isoscale.observe.doctor.hosts import merge, names, versions
from isoscale.parallel.environments.find import Environment
from isoscale.parallel.health.checkup import HealthCheck, RankSilent, resolved, why_alone, with_number
from isoscale.parallel.health.preflight import NAMES
from isoscale.parallel.health.probe import MEASURE, NUM_SMALL, Speed, Ways, speeds, ways
from isoscale.parallel.health.rendezvous import NotMet, OtherSecret, within
from isoscale.runs.directory import ROOT
from isoscale.science.registry import downloads
from isoscale.system.devices import KINDS, of
from isoscale.system.machine import usable_cores
from isoscale.system.printing import finish

LINGER = 5.0
"""Seconds that a rank which met nobody stays: a launcher that sees it end may end rank 0 before that has spoken."""
MOST_BLOCKED = 16
OPEN_PORTS = (
    "a firewall? hosts of one job must reach each other on all ports, since those are picked by the system; "
    "or take another network: export GLOO_SOCKET_IFNAME, its interface"
)
NOT_SHARED = {
    "runs folder": "ranks there do not find the checkpoints of rank 0: work in a folder that all hosts share, or name "
    "one with --run",
    "data folder": "bring the same data to all hosts, or export ISOSCALE_DATA, a folder that they share",
}


def of_host() -> Iterator[Finding]:
    """Every finding about this host, as it is made."""
    yield from examine()
    for subject, path in folders().items():
        yield folder(subject, path, must_be_writable=subject == "runs folder")
    there = [name for name, entry in downloads().items() if presence(entry)["present"]]
    yield Finding("data", "ok", f"there: {', '.join(there) or 'none'}; `isoscale data get` lists all")


def folders() -> dict[str, Path]:
    """The folders that a run writes and reads."""
    return {"runs folder": Path(ROOT), "data folder": data_folder()}


def of_ranks(environment: Environment) -> Iterator[Finding]:
    """What this rank has to say: rank 0 for all that have met, and each that met nobody for itself."""
    try:
        checkup = HealthCheck(environment)
    except UserError as error:
        yield from _not_met(environment, error)
        return
    try:
        for finding in _stages(checkup, environment):
            if checkup.is_first:
                yield finding
        checkup.close()
    except RankSilent as silent:
        if silent.speaks:
            yield Finding("ranks", "problem", str(silent))
        checkup.call_off()


def _not_met(environment: Environment, error: UserError) -> Iterator[Finding]:
    if isinstance(error, NotMet) and not error.speaks:
        return
    is_known = environment.rank == 0 or isinstance(error, OtherSecret)
    reason = None if is_known else why_alone(environment)
    *lines, last = str(error).splitlines()
    text, advice = reason or ("; ".join(lines) or last, last if lines else "")
    yield Finding("ranks", "problem", text, advice)
    if environment.rank == 0:
        yield from of_host()
    else:
        time.sleep(LINGER)


def _stages(checkup: HealthCheck, environment: Environment) -> Iterator[Finding]:
    """All ranks go through all of it together; what they yield is the same, or only that of rank 0 is right."""
    yield from _machines(checkup)
    if checkup.is_first:
        for scheduler in schedulers().values():
            yield from scheduler.findings()
    about = checkup.share("about", _myself(checkup, environment))
    yield _launcher(checkup, environment, about)
    yield from versions([(checkup.hosts[rank], each["versions"]) for rank, each in enumerate(about)])
    yield from _rank_map(checkup, about)
    yield from _shared_folders(checkup)
    found = ways(checkup)
    yield from _network(found)
    if not found.num_blocked and not found.without:
        yield from _speeds(checkup, about)


def _machines(checkup: HealthCheck) -> Iterator[Finding]:
    """What the first rank of each host finds there, and the others about their own device."""
    device = _device(checkup)
    mine = list(of_host()) if checkup.is_first_here else [step_on(device)] * (device.type != "cpu")
    checkup.tell("findings", [asdict(finding) for finding in mine])
    if checkup.is_first:
        found = [[Finding.read(each) for each in one] for one in checkup.hear("findings")]
        yield from merge(list(zip(checkup.hosts, found, strict=True)))


def _device(checkup: HealthCheck) -> torch.device:
    """The device that this rank would train on."""
    found = [device for device in accelerators() if KINDS[device.type].backend]
    return found[checkup.local_rank % len(found)] if found else torch.device("cpu")


def _myself(checkup: HealthCheck, environment: Environment) -> dict[str, Any]:
    device = _device(checkup)
    return {
        "kind": device.type, "device": "cpu" if device.type == "cpu" else device_words(device),
        "identity": f"{checkup.hosts[checkup.rank]} {of(device).identity}", "cores": usable_cores(),
        "versions": [__version__, torch.__version__, platform.python_version()],
        "meeting": resolved(environment.address),
    }  # fmt: skip


def _launcher(checkup: HealthCheck, environment: Environment, about: list[dict[str, Any]]) -> Finding:
    hosts = list(dict.fromkeys(checkup.hosts))
    # Where hosts differ, the number that the others see counts: rank 0 may call itself 127.0.0.1.
    number = about[-1]["meeting"][0]
    where = with_number(environment.address, number)
    text = f"{environment.launcher}: {checkup.world} ranks on {names(hosts)}, which meet at {where} "
    reason = f", because of {environment.inferred_from}" if environment.inferred_from else ""
    return Finding("launcher", "ok", f"{text}port {environment.port}{reason}")


def _rank_map(checkup: HealthCheck, about: list[dict[str, Any]]) -> Iterator[Finding]:
    """The ranks of each host with devices and cores, and those that share a device."""
    for host in dict.fromkeys(checkup.hosts):
        alike: dict[str, list[int]] = {}
        for rank, each in enumerate(about):
            if checkup.hosts[rank] == host:
                alike.setdefault(f"{each['device']}, {each['cores']:g} cores", []).append(rank)
        text = "; ".join(f"{_numbers(ranks)}: {what}" for what, ranks in alike.items())
        yield Finding("ranks", "ok", text, host=host)
    if _shares_a_device(about):
        text = "some ranks share a device, so that Gloo carries their tensors and not the device's own library"
        yield Finding("ranks", "warning", text, "start as many ranks on a host as it has devices")


def _numbers(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _shares_a_device(about: list[dict[str, Any]]) -> bool:
    identities = [each["identity"] for each in about if KINDS[each["kind"]].backend]
    return len(set(identities)) < len(identities)


def _backend(about: list[dict[str, Any]]) -> str | None:
    """What carries tensors between the devices of all ranks, besides Gloo."""
    kinds = {each["kind"] for each in about}
    return KINDS[kinds.pop()].backend if len(kinds) == 1 and not _shares_a_device(about) else None


def _shared_folders(checkup: HealthCheck) -> Iterator[Finding]:
    """Whether all hosts see a file that rank 0 leaves in each folder."""
    if len(set(checkup.hosts)) == 1:
        return
    marks = {subject: leave_mark(path) for subject, path in folders().items()} if checkup.is_first else {}
    try:
        told = checkup.share("marks", marks)[0]
        mine = {subject: _sees(subject, mark) for subject, mark in told.items()} if checkup.is_first_here else None
        seen = [(checkup.hosts[rank], each) for rank, each in enumerate(checkup.share("seen", mine)) if each]
    finally:
        for subject, mark in marks.items():
            if mark:
                remove_mark(folders()[subject], mark)
    for subject, path in folders().items():
        of_hosts = [(host, each[subject]) for host, each in seen]
        yield shared(subject, path, of_hosts, checkup.hosts[0], NOT_SHARED[subject])


def _sees(subject: str, mark: str | None) -> bool | None:
    return None if mark is None else sees_mark(folders()[subject], mark)


def _network(found: Ways) -> Iterator[Finding]:
    interfaces = names(dict.fromkeys(name or "an unknown interface" for name in found.interfaces.values()))
    num_ways = found.num_hosts * (found.num_hosts - 1)
    if found.without:
        text = f"there is no interface {found.interfaces[found.without[0]]}"
        advice = "unset GLOO_SOCKET_IFNAME, or name one that `ip link` shows"
        yield Finding("network", "problem", text, advice, names(found.without))
    elif found.num_blocked:
        for way in found.blocked[:MOST_BLOCKED]:
            text = f"{way.origin} cannot reach {way.target} ({way.address}) on port {way.port}: {way.reason}"
            yield Finding("network", "problem", text, OPEN_PORTS)
        text = f"{found.num_blocked} of {num_ways} ways between hosts are blocked, so that nothing can be measured"
        yield Finding("network", "problem", text, "see the lines above")
    elif found.num_hosts == 1:
        yield Finding("network", "ok", f"one host, over {interfaces}")
    else:
        yield Finding("network", "ok", f"every host reaches every other one ({num_ways} ways), over {interfaces}")


def _speeds(checkup: HealthCheck, about: list[dict[str, Any]]) -> Iterator[Finding]:
    """What rank 0 measures, unless a rank could not."""
    told = checkup.share("speeds", _measured(checkup, _backend(about)))
    failed = [(rank, each["error"]) for rank, each in enumerate(told) if "error" in each]
    if failed:
        rank, reason = failed[0]
        text = f"fails on {len(failed)} of {checkup.world} ranks; rank {rank} on {checkup.hosts[rank]}: {reason}"
        advice = "for its own words: export NCCL_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO"
        yield Finding("all-reduce", "problem", text, advice)
    else:
        yield from (_speed(NAMES[name], Speed(**speed)) for name, speed in told[0]["speeds"].items())


def _measured(checkup: HealthCheck, backend: str | None) -> dict[str, Any]:
    try:
        found = within(MEASURE, lambda: speeds(checkup, backend, _device(checkup)))
    except TimeoutError as error:
        atexit.register(_leave)
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    return {"speeds": {name: asdict(speed) for name, speed in found.items()}}


def _leave() -> None:
    """End a process of which a thread waits for ever, and which would wait for that at its own end."""
    finish()
    os._exit(USER_CAN_FIX)


def _speed(name: str, found: Speed) -> Finding:
    small = f"{1e6 * found.small:.0f} µs for one number (median of {NUM_SMALL})"
    large = f"{found.bandwidth / 1e9:.2g} GB/s for {found.num_bytes / 1e6:.0f} MB of float32 (algorithm bandwidth)"
    return Finding("all-reduce", "ok", f"{name}: {small}, {large}")
