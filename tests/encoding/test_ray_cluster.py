"""Preparing on a Ray cluster, with a stand-in for Ray that keeps its documented interface and pickles what crosses."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
from test_prepare_sharing import SlowLetterEncoder, account, config_of, line, rows_for, write

from luthier.errors import UserError
from luthier.preparation import work_units as units_room
from luthier.preparation.prepare import prepare


def crossed(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301


class RayTaskError(Exception):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(Exception):
    pass


class FakeRay(ModuleType):
    """A cluster whose tasks run when they are waited for, the youngest first."""

    def __init__(self, *, num_cpus=2, dies=False, hangs=False):
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayTaskError=RayTaskError, RayActorError=RayActorError)
        self.num_cpus, self.dies, self.hangs = num_cpus, dies, hangs
        self.connected, self.options, self.actors, self.order = False, None, [], []
        self.results = {}

    def init(self, *, address, log_to_driver, **more):
        if address == "nowhere":
            raise ConnectionError("nobody there")
        self.connected = True

    def is_initialized(self):
        return self.connected

    def shutdown(self):
        self.connected = False

    def cluster_resources(self):
        return {"CPU": float(self.num_cpus), "memory": 1e9}

    def put(self, value):
        return crossed(value)

    def remote(self, **options):
        self.options = options

        def of_class(kind):
            return SimpleNamespace(remote=lambda *args: self._actor(kind(*map(crossed, args))))

        return of_class

    def _actor(self, instance):
        def submit(*args):
            reference = object()
            self.results[reference] = lambda: instance.resolve(*map(crossed, args))
            self.order.append(args[0])
            return reference

        self.actors.append(instance)
        return SimpleNamespace(resolve=SimpleNamespace(remote=submit))

    def wait(self, references, *, num_returns, timeout):
        assert num_returns == 1 and timeout > 60
        return ([], references) if self.hangs else (references[-1:], references[:-1])

    def get(self, reference):
        if self.dies:
            raise RayActorError("out of memory")
        try:
            return crossed(self.results.pop(reference)())
        except UserError as error:
            raise RayTaskError(error) from error


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(units_room, "UNIT_BYTES", 500)

    def start(**how):
        ray = FakeRay(**how)
        monkeypatch.setitem(sys.modules, "ray", ray)
        return ray

    return start


def test_a_cluster_gives_what_one_process_gives(tmp_path, cluster):
    path = rows_for(tmp_path, 120)
    alone = prepare(config_of(tmp_path / "alone", path), SlowLetterEncoder())
    ray = cluster(num_cpus=3)
    reports = []
    found = prepare(config_of(tmp_path, path), SlowLetterEncoder(), ray_address="auto", on_progress=reports.append)
    assert account(found) == account(alone)
    assert (found.num_encoded, found.num_reused) == (alone.num_encoded, alone.num_reused)
    assert len(ray.actors) == 3
    assert ray.options == {"num_cpus": 1, "max_restarts": 3, "max_task_retries": 3}
    assert not ray.connected  # and left
    assert reports[-1].read == 120
    assert reports[-1].share == 1.0
    assert [report.share for report in reports] == sorted(report.share for report in reports)


def test_a_cluster_finds_what_was_prepared_before(tmp_path, cluster):
    path = rows_for(tmp_path, 40)
    prepare(config_of(tmp_path, path), SlowLetterEncoder())
    cluster()
    again = prepare(config_of(tmp_path, path), SlowLetterEncoder(), ray_address="auto")
    assert again.num_encoded == 0
    assert again.num_reused == len(again.train)


def test_tasks_that_run_ahead_are_few(tmp_path, cluster):
    ray = cluster(num_cpus=2)
    waiting = []
    wait = ray.wait
    ray.wait = lambda references, **how: waiting.append(len(references)) or wait(references, **how)
    prepare(config_of(tmp_path, rows_for(tmp_path, 120)), SlowLetterEncoder(), ray_address="auto")
    assert max(waiting) == 4


def test_without_ray_the_command_that_installs_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    path = write(tmp_path / "rows.jsonl", [line("a")])
    with pytest.raises(UserError, match=r"(?s)'ray' is not installed.*pip install .*ray"):
        prepare(config_of(tmp_path, path), SlowLetterEncoder(), ray_address="auto")


def test_no_cluster_and_dead_processes_are_told(tmp_path, cluster):
    path = write(tmp_path / "rows.jsonl", [line("a")])
    cluster()
    with pytest.raises(UserError, match=r"(?s)--ray nowhere: no cluster answers.*--ray local"):
        prepare(config_of(tmp_path, path), SlowLetterEncoder(), ray_address="nowhere")
    ray = cluster(dies=True)
    with pytest.raises(UserError, match="died"):
        prepare(config_of(tmp_path, path), SlowLetterEncoder(), ray_address="auto")
    assert not ray.connected
    ray = cluster(hangs=True)
    with pytest.raises(UserError, match="finished no part for 1800 s; it is at part 1 of 1"):
        prepare(config_of(tmp_path, path), SlowLetterEncoder(), ray_address="auto")
    assert not ray.connected


def test_a_node_that_sees_other_data_is_refused(tmp_path, cluster, monkeypatch):
    ray = cluster()
    submit = ray._actor
    monkeypatch.setattr(ray, "_actor", lambda instance: (setattr(instance, "_identity", "other"), submit(instance))[1])
    path = write(tmp_path / "rows.jsonl", [line("a")])
    with pytest.raises(UserError, match="sees other data"):
        prepare(config_of(tmp_path, path), SlowLetterEncoder(), ray_address="auto")
