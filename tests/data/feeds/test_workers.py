"""Worker processes read a dataset ahead of the training, change nothing about the result, and never outlive it."""

import faulthandler
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import isoscale
from isoscale.data.batches import BatchPlan, tensors_of
from isoscale.data.feeds import workers
from isoscale.data.feeds.feed import Part
from isoscale.data.feeds.hanging import Pulse
from isoscale.data.feeds.host import HostFeed
from isoscale.data.feeds.shared_memory import ALIGNMENT, Packed, pack, unpack
from isoscale.data.feeds.workers import Worker, WorkerPool, count_workers, end_workers, start_method, why_not_sent
from isoscale.data.order import Order
from isoscale.data.samples import InProcess
from isoscale.data.sources import DatasetSource, Source, Subset
from isoscale.engine.state.checkpoint import read
from isoscale.errors import UserError
from isoscale.system import signals
from tests import warm
from tests.helpers import QUIET, cli, command, sha, timeless

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
COUNTS = pytest.mark.parametrize("count", [0, 1, 3])


class Noisy(Dataset):
    """Samples that draw from all three generators."""

    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return {"index": index, "input": torch.tensor(drawn), "target": torch.tensor([sum(drawn)])}


class Slow(Dataset):
    """Samples that take their time: those of the table, and no time for the others."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds.get(index, 0))
        return index


class Broken(Dataset):
    """A dataset with something wrong at sample 7."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return self.act() if index == 7 else index


class Odd(Exception):
    """An error that pickle cannot make again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def feed_of(source: Source | Dataset, count: int, plan: BatchPlan, **options: Any) -> HostFeed:
    """A feed of shuffled samples that `count` workers read."""
    source = source if isinstance(source, Source) else DatasetSource(source)
    shuffle = options.pop("shuffle", True)
    feed = HostFeed(source, Order(len(source), 3, shuffle), plan, CPU)
    seed, method = options.get("seed", 5), options.get("method", "fork")
    feed.read_with(WorkerPool(source, seed, count, method) if count else InProcess(source, seed))
    return feed


def in_order(dataset: Dataset, count: int) -> HostFeed:
    """A feed of batches of four in the order of the dataset."""
    return feed_of(dataset, count, BatchPlan(40, 4), shuffle=False)


def delivered(feed: HostFeed, steps: Any) -> list[list[list[Part]]]:
    """The parts of some steps, after which the feed is closed."""
    try:
        return [feed.parts(step) for step in steps]
    finally:
        feed.close()


def assert_same(one: Any, other: Any) -> None:
    """Two deliveries agree in every bit."""
    left, right = tensors_of(one), tensors_of(other)
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


def drawn_by_sample(feed: HostFeed, steps: range) -> dict[tuple[int, int], list[float]]:
    """What was drawn for each sample, by how often it had come before."""
    found: dict[tuple[int, int], list[float]] = {}
    for shards in delivered(feed, steps):
        for part in (part for shard in shards for part in shard):
            for index, row in zip(part.batch["index"].tolist(), part.batch["input"].tolist(), strict=True):
                found[index, sum(key[0] == index for key in found)] = row
    return found


def processes_of(group: int) -> list[int]:
    """Processes of a session that are alive."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            found += [int(folder.name)] if int(session) == group and state != "Z" else []
    return found


SERVERS = (b"resource_tracker", b"forkserver", b"warm.py")


def children() -> list[int]:
    """Worker processes of this process that are alive; other tests may have left servers that start processes."""
    words = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = {int(word): Path(f"/proc/{word}/cmdline").read_bytes() for word in words}  # empty for a process that ended
    return [pid for pid, line in lines.items() if line and not any(word in line for word in SERVERS)]


def wait_until(is_true: Callable[[], Any], seconds: float = 20) -> None:
    """Wait for something that takes a moment."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    assert set(children()) <= set(before)
    assert not [thread for thread in threading.enumerate() if thread.name == "isoscale-reader"]


@pytest.mark.parametrize("plan", [BatchPlan(40, 7), BatchPlan(40, 16, num_micro=2, num_shards=4), BatchPlan(60, 9)])
def test_the_number_of_workers_changes_no_bit_of_a_dataset_that_draws_from_all_generators(plan):
    steps = [0, 1, 2, 9, 10, 3, 4]
    expected = delivered(feed_of(Noisy(), 0, plan), steps)
    for count in (1, 3):
        assert_same(delivered(feed_of(Noisy(), count, plan), steps), expected)


def test_spawned_workers_deliver_what_forked_ones_do():
    steps = [3, 4, 0]
    expected = delivered(feed_of(Noisy(), 1, BatchPlan(40, 7)), steps)
    assert_same(delivered(feed_of(Noisy(), 2, BatchPlan(40, 7), method="spawn"), steps), expected)


@COUNTS
def test_a_sample_is_the_same_in_any_batch_and_another_in_every_epoch(count):
    large = drawn_by_sample(feed_of(Noisy(), count, BatchPlan(40, 20)), range(4))
    small = drawn_by_sample(feed_of(Noisy(), 0, BatchPlan(40, 8, num_shards=2)), range(10))
    assert large == small and len(large) == 80
    values = np.array(list(large.values()))
    assert np.unique(values).size == values.size, "no two samples, epochs or generators draw the same"


def test_an_epoch_longer_than_the_data_draws_anew_for_a_sample_that_comes_again():
    drawn = drawn_by_sample(feed_of(Noisy(), 1, BatchPlan(100, 20)), range(5))
    assert len({tuple(row) for row in drawn.values()}) == 100


def test_another_seed_draws_other_numbers():
    one, other = (drawn_by_sample(feed_of(Noisy(), 0, BatchPlan(40, 40), seed=seed), range(1)) for seed in (0, 1))
    assert all(one[key] != other[key] for key in one)


class Raw(Noisy):
    """Samples that show the low bits which numpy's and torch's generators, of one kind, give next."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        numpy = int(np.random.randint(1 << 32, dtype=np.uint32)) % (1 << 20)
        return {"input": torch.tensor([numpy, int(torch.randint(1 << 20, ()))])}


def test_numpy_and_torch_do_not_draw_the_same_numbers():
    ((((part,),)),) = delivered(feed_of(Raw(), 0, BatchPlan(40, 40)), [0])
    numpy, of_torch = part.batch["input"].unbind(1)
    assert (numpy != of_torch).all()


def mixed(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collate function that draws as well."""
    return {"input": torch.stack([sample["input"] for sample in samples]) * torch.rand(()) * np.random.rand()}


def test_what_a_collate_function_draws_does_not_depend_on_the_workers():
    source = DatasetSource(Noisy(), mixed)
    expected = delivered(feed_of(source, 0, BatchPlan(40, 7)), range(4))
    assert_same(delivered(feed_of(source, 2, BatchPlan(40, 7)), range(4)), expected)


@COUNTS
def test_the_generators_and_threads_of_the_training_process_are_left_alone(count):
    torch.set_num_threads(2)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    delivered(feed_of(Noisy(), count, BatchPlan(40, 7)), range(3))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()) == (*before[1:], 2)


class Surroundings(Dataset):
    """Samples that tell how they were read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"threads": torch.get_num_threads(), "value": torch.tensor(0.5), "process": os.getpid()}


@pytest.mark.parametrize(("count", "method"), [(0, "fork"), (1, "fork"), (1, "spawn")])
def test_a_dataset_is_read_with_one_thread_and_the_training_s_default_dtype(count, method):
    torch.set_default_dtype(torch.float64)
    try:
        (((part,),),) = delivered(feed_of(Surroundings(), count, BatchPlan(40, 4), method=method), [0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert part.batch["threads"].tolist() == [1] * 4
    assert part.batch["value"].dtype == torch.float64
    assert (os.getpid() in part.batch["process"]) == (count == 0)


def test_a_subset_is_read_by_its_own_indices():
    subset = Subset(Subset(DatasetSource(Noisy()), torch.arange(39, 9, -1)), torch.arange(0, 30, 3))
    for count in (0, 2):
        for shards in delivered(feed_of(subset, count, BatchPlan(10, 4)), range(3)):
            ((part,),) = shards
            assert part.batch["index"].tolist() == [39 - 3 * sample for sample in part.samples.tolist()]


def test_parts_arrive_in_order_though_the_first_takes_longest():
    feed = in_order(Slow({0: 0.5, 9: 0.2}), 3)
    assert [part.batch.tolist() for shards in delivered(feed, range(6)) for (part,) in shards] == [
        list(range(start, start + 4)) for start in range(0, 24, 4)
    ]


def test_workers_read_ahead_while_the_training_computes():
    seconds = 0.1
    feed = in_order(Slow(dict.fromkeys(range(40), seconds)), 1)
    feed.parts(0)
    time.sleep(16 * seconds)
    begin = time.monotonic()
    for step in (1, 2, 3):
        feed.parts(step)
    assert time.monotonic() - begin < 12 * seconds / 2, "half of what the samples of three steps take"
    feed.close()


def test_the_same_processes_read_every_epoch_and_after_every_jump():
    feed = feed_of(Surroundings(), 2, BatchPlan(40, 4))
    found = {int(pid) for step in [*range(25), 3, 100, 4] for pid in feed.parts(step)[0][0].batch["process"]}
    assert len(found) == 2 and found == set(children())
    feed.close()


def test_a_jump_does_not_wait_for_what_was_read_ahead():
    seconds = 1.0
    feed = in_order(Slow({index: seconds for index in range(4, 40)}), 1)
    feed.parts(0)
    begin = time.monotonic()
    feed.parts(0)
    assert time.monotonic() - begin < 4 * seconds, "the sample under way, not the two parts of four samples"
    feed.close()


def test_after_a_jump_what_was_asked_for_before_is_not_delivered():
    feed = in_order(Slow({}), 2)
    for step in [0, 5, 0, 5, 2] * 4:
        assert feed.parts(step)[0][0].batch.tolist() == list(range(4 * step, 4 * step + 4))
        time.sleep(0.02)  # workers answer what nobody will take
    feed.close()


def test_a_closed_feed_leaves_no_process_and_delivers_again():
    feed = feed_of(Noisy(), 2, BatchPlan(40, 7))
    expected = feed.parts(4)
    assert len(children()) == 2
    for _ in range(2):
        feed.close()
    assert not children()
    assert_same(feed.parts(4), expected)
    feed.close()


def test_a_worker_that_hangs_in_a_sample_is_killed_after_a_moment(monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.3)
    feed = in_order(Slow({20: 1000.0}), 2)
    feed.parts(0)
    feed.close()  # would wait for a quarter of an hour
    assert not children()


@pytest.mark.slow
@pytest.mark.parametrize("num_hanging", [1, workers.BIRTHS])
def test_a_process_that_hangs_when_it_is_forked_is_forked_again(monkeypatch, num_hanging):
    born = multiprocessing.Value("i", 0)

    def live(*arguments: Any) -> None:
        with born.get_lock():
            born.value += 1
            hangs = born.value <= num_hanging
        if hangs:
            time.sleep(1000)
        life(*arguments)

    life = workers.work_and_say_so
    monkeypatch.setattr(workers, "work_and_say_so", live)
    monkeypatch.setattr(workers, "BIRTH_SECONDS", 1.0)
    feed = in_order(Slow({}), 1)
    if num_hanging == workers.BIRTHS:
        with pytest.raises(UserError, match=r"did not start within 1 s, tried 3 times; data\.workers=0 reads"):
            delivered(feed, range(2))
    else:
        assert len(delivered(feed, range(2))) == 2
        assert born.value == 2


def test_closing_one_of_two_feeds_does_not_wait_for_the_other(monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 60.0)
    feeds = [in_order(Slow({}), 2), in_order(Slow({}), 2)]
    for feed in feeds:
        feed.parts(0)
    begin = time.monotonic()
    for feed in feeds:
        feed.close()
    assert time.monotonic() - begin < workers.GRACE_SECONDS / 2


def wrong_value() -> None:
    raise LookupError("no such atom")


@COUNTS
def test_an_error_in_a_dataset_names_the_sample_and_keeps_the_traceback(count):
    feed = in_order(Broken(wrong_value), count)
    feed.parts(0)
    for _ in range(2):
        with pytest.raises(LookupError, match="no such atom") as caught:
            feed.parts(1)
        notes = "\n".join(caught.value.__notes__)
        assert "while reading sample 7 of Broken" in notes
        shown = notes if count else "".join(str(line) for line in caught.traceback)
        assert ("in wrong_value" if count else "raise LookupError") in shown
        assert "samples.py" not in notes, "our own lines are of no use to the reader"
    assert feed.parts(2)[0][0].samples.tolist() == [8, 9, 10, 11]
    feed.close()


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda: (_ for _ in ()).throw(Odd(1, 2)), RuntimeError, "Odd: 1 and 2"),
        (lambda: (_ for _ in ()).throw(UserError("set data.path")), UserError, "set data.path"),
    ],
)
def test_errors_of_every_kind_come_out_of_a_worker(act, kind, words):
    feed = in_order(Broken(act), 1)
    feed.parts(0)
    with pytest.raises(kind, match=words) as caught:
        feed.parts(1)
    assert kind is not UserError or "worker" not in str(getattr(caught.value, "__notes__", ""))
    feed.close()


def unsendable(samples: list[Any]) -> Any:
    """A batch that no process can send."""
    return threading.Lock()


def test_a_batch_that_cannot_be_sent_is_explained():
    feed = feed_of(DatasetSource(Noisy(), unsendable), 1, BatchPlan(40, 4))
    with pytest.raises(UserError, match=r"cannot send what the dataset gives.*data\.workers=0"):
        feed.parts(0)
    feed.close()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"SIGKILL.*memory.*data\.workers=1"),
        (lambda: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)), r"SIGSEGV.*data\.workers=0"),
        (lambda: os._exit(3), r"exit code 3.*data\.workers=0"),
    ],
)
def test_a_worker_that_dies_is_reported_at_once_with_what_to_do(act, words):
    feed = in_order(Broken(act), 2)
    with pytest.raises(UserError, match=rf"(?s)worker process \d of 2 \(process \d+\).*{words}"):
        feed.parts(1)
    feed.close()


def test_a_worker_that_dies_while_it_has_nothing_to_do_is_reported_too():
    feed = in_order(Slow({}), 1)
    feed.parts(0)
    time.sleep(0.3)
    os.kill(children()[0], signal.SIGKILL)
    with pytest.raises(UserError, match="SIGKILL"):
        for step in range(1, 20):
            feed.parts(step)
    feed.close()


def test_workers_ignore_the_signals_that_stop_a_training():
    feed = in_order(Slow({}), 2)
    feed.parts(0)
    for pid in children():
        for number in signals.ALL:
            os.kill(pid, number)
    assert len(delivered(feed, range(1, 20))) == 19


SCRIPT = """
import sys, time
import torch
from torch.utils.data import Dataset
sys.path.insert(0, {root!r})
from tests.data.feeds.test_workers import Slow, feed_of
from isoscale.data.batches import BatchPlan
print("script", flush=True)
feed = feed_of(Slow({{20: 100.0}}), 2, BatchPlan(40, 4), shuffle=False, method={method!r})
feed.parts(0)
print("read", flush=True)
{end}
"""


def script(method: str, end: str) -> subprocess.Popen[str]:
    """A script without a guard, which reads a step and then does something."""
    text = SCRIPT.format(root=str(Path(__file__).parents[3]), method=method, end=end)
    path = Path(os.environ["PYTEST_TMP"]) / "script.py"
    path.write_text(text)
    return warm.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_die_with_a_training_that_is_killed(method: str, folder: Path):
    process = script(method, "time.sleep(100)")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["script\n", "read\n"], "and no worker runs the script"
    wait_until(lambda: len(processes_of(process.pid)) >= 3)
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(process.pid), 5)
    process.stdout.close()


def test_a_script_that_ends_without_closing_its_feed_does_not_hang(folder: Path):
    process = script("fork", "raise SystemExit(4)")
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (4, "script\nread\n")
    wait_until(lambda: not processes_of(process.pid), 5)


def test_all_workers_end_though_another_thread_has_learned_first_that_one_did(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 0.1)
    context = multiprocessing.get_context("fork")
    both = []
    for _ in range(2):
        process = context.Process(target=time.sleep, args=(100,))
        process.start()
        both.append(Worker(process, context.Pipe()[0], Pulse(context)))
    pids = [worker.process.pid for worker in both]
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)  # as a thread does that waits for the exit code, before it has written it down
    end_workers(both, context.RawValue("q", 0))
    assert not both and not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Pair(NamedTuple):
    one: Tensor
    two: Any


def handed_over(item: Any) -> Any:
    """What comes out of shared memory."""
    packed: Packed = pack(item)
    try:
        return unpack(packed)
    finally:
        os.close(packed.file)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7, dtype=torch.int8),
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5).t(),
        torch.randn(5, 6)[::2, ::3],
        torch.randn(3, 1).expand(3, 4),
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(3, requires_grad=True),
        torch.eye(3).to_sparse(),
    ],
)
def test_any_tensor_keeps_its_values_dtype_and_memory_format(tensor):
    found = handed_over({"a": [tensor], "b": torch.ones(3)})["a"][0]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape
    assert torch.equal(found.to_dense(), tensor.detach().to_dense().resolve_conj())
    if not tensor.is_sparse and tensor.detach().clone().stride() == tensor.stride():
        assert found.stride() == tensor.stride() and found.data_ptr() % ALIGNMENT == 0


def test_batches_of_any_structure_are_handed_over():
    batch = {"pair": Pair(torch.ones(2), {"names": ["a", None], 3: (torch.zeros(1), 2.5)}), "array": np.arange(3)}
    found = handed_over(batch)
    assert isinstance(found["pair"], Pair) and found["pair"].two["names"] == ["a", None]
    assert found["pair"].two[3][1] == 2.5 and found["array"].tolist() == [0, 1, 2]
    found["pair"].one.add_(1)
    assert found["pair"].one.tolist() == [2, 2], "a batch may be changed in place"


def test_handing_over_leaves_no_descriptor_open():
    feed = feed_of(Noisy(), 2, BatchPlan(40, 4))
    feed.parts(0)
    folders = [f"/proc/{pid}/fd" for pid in (os.getpid(), *children())]
    before = [len(os.listdir(folder)) for folder in folders]
    for step in range(1, 60):
        feed.parts(step)
    assert all(len(os.listdir(folder)) <= count + 4 for folder, count in zip(folders, before, strict=True))
    feed.close()


@pytest.mark.parametrize(
    ("asked", "variable", "wish", "cores", "expected"),
    [
        ("auto", None, None, 1, 0), ("auto", None, None, 0.5, 0), ("auto", None, None, 1.9, 0),
        ("auto", None, None, 2, 1), ("auto", None, None, 5.5, 4), ("auto", None, None, 64, 8),
        ("auto", None, 3, 64, 3), ("auto", None, 0, 64, 0), ("auto", "5", 3, 64, 5), ("auto", "0", 3, 64, 0),
        ("auto", "", None, 3, 2), (12, "5", 3, 2, 12), (0, "5", 3, 64, 0),
    ],
)  # fmt: skip
def test_how_many_workers_there_are(monkeypatch, asked, variable, wish, cores, expected):
    monkeypatch.delenv("NUM_WORKERS", raising=False)
    if variable is not None:
        monkeypatch.setenv("NUM_WORKERS", variable)
    assert count_workers(asked, wish, cores) == expected


@pytest.mark.parametrize("variable", ["many", "-1", "2.5"])
def test_a_variable_that_is_no_number_is_refused(monkeypatch, variable):
    monkeypatch.setenv("NUM_WORKERS", variable)
    with pytest.raises(UserError, match=rf"NUM_WORKERS is '{variable}'"):
        count_workers("auto", None, 4)


def test_processes_are_forked_only_where_no_device_is_in_use(monkeypatch):
    assert start_method(CPU) == "fork"
    assert start_method(torch.device("cuda", 0)) == start_method(torch.device("xpu", 0)) == "spawn"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert start_method(CPU) == "spawn"


def test_a_dataset_that_cannot_be_sent_says_why():
    assert why_not_sent(DatasetSource(Noisy())) is None
    assert "lambda" in str(why_not_sent(DatasetSource(Noisy(), lambda samples: samples)))
    in_script = type("InScript", (Noisy,), {"__module__": "__main__"})
    sys.modules["__main__"].InScript = in_script  # type: ignore[attr-defined]
    try:
        assert pickle.dumps(in_script())
        assert "InScript" in str(why_not_sent(DatasetSource(in_script())))
    finally:
        del sys.modules["__main__"].InScript  # type: ignore[attr-defined]


RECIPE: dict[str, Any] = {
    "seed": 3,
    "data": {"batch_size": 8},
    "train": {"epochs": 3},
    "observe": {"every": 2, "tensorboard": 0, "level": "error"},
}


def fitted(path: Path, data: Any, **section: Any) -> isoscale.Run:
    """A training with equal initial weights."""
    torch.manual_seed(0)
    recipe = {**RECIPE, "data": {**RECIPE["data"], **section}}
    sources = data if isinstance(data, DataLoader) else isoscale.Sources(train=data, val=Noisy(12))
    return isoscale.Trainer(recipe, run=path).fit(isoscale.Supervised(nn.Linear(3, 1)), sources)


def test_weights_and_metrics_are_the_same_with_any_number_of_workers(tmp_path: Path):
    runs = [fitted(tmp_path / str(count), Noisy(), workers=count) for count in (0, 1, 3)]
    for run in runs[1:]:
        assert sha(run) == sha(runs[0]) and timeless(run) == timeless(runs[0])


def test_a_loader_s_number_of_workers_is_a_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    start = WorkerPool._start
    monkeypatch.setattr(WorkerPool, "_start", lambda self: (made.append(self._num_workers), start(self)))
    monkeypatch.delenv("NUM_WORKERS", raising=False)
    loader = DataLoader(Noisy(), 8, num_workers=2, worker_init_fn=print)
    fitted(tmp_path / "wish", loader)
    fitted(tmp_path / "recipe", loader, workers=1)
    monkeypatch.setenv("NUM_WORKERS", "3")
    fitted(tmp_path / "variable", loader)
    monkeypatch.delenv("NUM_WORKERS")
    fitted(tmp_path / "none", DataLoader(Noisy(), 8))
    assert made == [2, 1, 3]
    assert "worker_init_fn is not called" in (tmp_path / "wish" / "log.txt").read_text()


def test_workers_beside_tensors_are_said_to_be_unused(tmp_path: Path):
    rows = {"input": torch.randn(40, 3), "target": torch.randn(40, 1)}
    for workers_, is_said in ((2, True), (0, False), ("auto", False)):
        fitted(tmp_path / str(workers_), rows, workers=workers_)
        assert ("data.workers is not used" in (tmp_path / str(workers_) / "log.txt").read_text()) == is_said


def test_a_dataset_that_cannot_be_sent_is_refused_or_read_in_the_training_process(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("isoscale.engine.splits.start_method", lambda device: "spawn")
    monkeypatch.setenv("NUM_WORKERS", "2")
    data = DatasetSource(Noisy(), lambda samples: torch.utils.data.default_collate(samples))
    with pytest.raises(UserError, match=r"data\.workers is 2.*cannot be sent.*lambda.*data\.workers=0"):
        fitted(tmp_path / "asked", data, workers=2)
    run = fitted(tmp_path / "auto", data)
    assert "is read in the training process, because" in (run.path / "log.txt").read_text()
    assert sha(run) == sha(fitted(tmp_path / "plain", Noisy(), workers=0))


DATASET = """
import os, random, time
import numpy as np
import torch
from torch.utils.data import Dataset
import isoscale

class Augmented(Dataset):
    def __init__(self, seconds, is_mortal):
        self.seconds, self.is_mortal = seconds, is_mortal
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(self.seconds)
        if self.is_mortal and index == 40 and os.path.exists("run/checkpoints/last"):
            os.kill(os.getpid(), 9)
        x = torch.randn(3) + np.random.rand() + random.random()
        return {"input": x, "target": x.sum(0, keepdim=True)}

def load(seconds=0.0):
    return isoscale.Sources(train=Augmented(seconds, "DIE" in os.environ), val=Augmented(0.0, False))
"""
TRAINING = """
task: {class: supervised, model: {class: torch.nn.Linear, in_features: 3, out_features: 1}, loss: mse}
data: {class: augmented.load, batch_size: 8}
train: {epochs: 6}
checkpoint: {every: 3 steps}
"""
WORDS = (
    "train",
    "training.yaml",
    "--run",
    "run",
    "observe.every=2",
    *(f"{key}={value}" for key, value in QUIET.items()),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a dataset and a recipe."""
    (tmp_path / "augmented.py").write_text(DATASET)
    (tmp_path / "training.yaml").write_text(TRAINING)
    return tmp_path


def assert_never_stopped(project: Path, *words: str) -> None:
    """The run is one that was never stopped and was read in the training process."""
    other = project / "other"
    other.mkdir()
    for name in ("augmented.py", "training.yaml"):
        (other / name).write_text((project / name).read_text())
    assert cli(*WORDS, *words, cwd=other, NUM_WORKERS="0").returncode == 0
    assert sha(project / "run") == sha(other / "run") and timeless(project / "run") == timeless(other / "run")


def test_a_worker_killed_in_mid_training_is_a_clear_error_and_the_run_goes_on_with_another_number(project: Path):
    failed = cli(*WORDS, cwd=project, NUM_WORKERS="2", DIE="1")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "SIGKILL" in failed.stderr and "data.workers=1" in failed.stderr
    assert json.loads((project / "run/run.json").read_text())["status"] == "failed"
    assert read((project / "run/checkpoints/last").resolve())[1]["progress"]["step"] >= 3
    done = cli(*WORDS, cwd=project, NUM_WORKERS="3")
    assert done.returncode == 0, done.stderr
    assert_never_stopped(project)


SLOW_SAMPLES = "data.seconds=0.01"


def stopped(project: Path, number: int, count: str, to_all: bool) -> int:
    """Start or continue a training of slow samples, send a signal when it runs, and return its exit code."""
    environment = {**os.environ, "NUM_WORKERS": count}
    process = warm.Popen(
        [*command(*WORDS), SLOW_SAMPLES], cwd=project, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    log = project / "run/metrics.jsonl"
    size = log.stat().st_size if log.exists() else 0
    try:
        wait_until(lambda: process.poll() is not None or (log.exists() and log.stat().st_size > size), 60)
        assert len(processes_of(process.pid)) > int(count)
        (os.killpg if to_all else os.kill)(process.pid, number)
        code = process.wait(60)
        wait_until(lambda: not processes_of(process.pid), 5)
        return code
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.nightly  # half a minute
def test_stopped_by_any_signal_and_continued_with_another_number_of_workers(project: Path):
    assert stopped(project, signal.SIGTERM, "2", to_all=False) == 75
    assert stopped(project, signal.SIGINT, "1", to_all=True) == 75, "Ctrl-C reaches every process of a terminal"
    assert stopped(project, signal.SIGTERM, "3", to_all=True) == 75
    assert stopped(project, signal.SIGKILL, "2", to_all=False) == -signal.SIGKILL
    done = cli(*WORDS, SLOW_SAMPLES, cwd=project, NUM_WORKERS="1")
    assert done.returncode == 0, done.stderr
    assert_never_stopped(project, SLOW_SAMPLES)
