"""Rows C1, C2, C4 and C7: a run that is killed anywhere resumes bit-for-bit."""

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import faults
from faults import Kill, free_port
from polaformer.errors import DataError
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.running import resume

NUM_SAVES = 8
faults_only = pytest.mark.faults


def calls_of_each_save() -> list[int]:
    """The number of system calls of each save of a whole run, counted on saves of files of the same names."""
    import tempfile

    from polaformer.training import checkpoint

    files = dict.fromkeys(("state.json", "model.safetensors", "optimizer.safetensors", "ema.safetensors"), b"x")
    counts: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        for save in range(NUM_SAVES):
            counting = faults.Counting()
            with faults.seen_by(checkpoint, counting):
                checkpoint.write(Path(folder) / "checkpoints", save, files, keep=3)
            counts.append(counting.calls)
    return counts


CALLS = calls_of_each_save()
FIRST_SAVE = range(1, CALLS[0] + 1)
PRUNING_SAVE = range(sum(CALLS[:4]) + 1, sum(CALLS[:5]) + 1)


def sampled(values: range, every: int) -> list[Any]:
    """One of `every` values for the default suite, the others for `make test-faults`."""
    return [pytest.param(value, marks=() if place % every == every // 2 else faults_only) for place, value in enumerate(values)]


class Reference:
    """The uninterrupted run, made once per number of processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe: ClassificationRecipe = faults.tiny(faults.write_data(folder / "digits.npz"))
        self._outcomes: dict[int, dict[str, Any]] = {}

    def outcome(self, processes: int = 1) -> dict[str, Any]:
        if processes not in self._outcomes:
            run = self.folder / f"uninterrupted-{processes}"
            assert faults.run(run, self.recipe, processes=processes, port=free_port()) == [0] * processes
            self._outcomes[processes] = faults.outcome(run)
        return self._outcomes[processes]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


def assert_resumes(reference: Reference, run: Path, processes: int = 1) -> None:
    """Resume the run; its outcome must equal that of the uninterrupted run, with no partial checkpoints left."""
    codes = faults.run(run, reference.recipe, processes=processes, port=free_port())
    assert codes == [0] * processes, faults.errors(run)
    found, wanted = faults.outcome(run), reference.outcome(processes)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name] == wanted[name], name
    assert not [path for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]


def test_the_uninterrupted_run_is_the_same_every_time(reference: Reference, tmp_path: Path) -> None:
    wanted = reference.outcome()
    assert faults.run(tmp_path / "again", reference.recipe) == [0]
    assert faults.outcome(tmp_path / "again") == wanted
    losses = [line["loss"] for line in wanted["journal"] if line["kind"] == "eval"]
    assert wanted["state"]["progress"]["step"] == faults.STEPS
    assert len(set(losses)) == 4


@pytest.mark.parametrize("step", sampled(range(1, faults.STEPS + 1), 24))
def test_resume_after_kill_is_bitwise_equal(step: int, reference: Reference, tmp_path: Path) -> None:
    assert faults.run(tmp_path / "run", reference.recipe, Kill("update", step)) == [-signal.SIGKILL]
    assert_resumes(reference, tmp_path / "run")


@pytest.mark.parametrize("call", [*sampled(FIRST_SAVE, 27), *sampled(PRUNING_SAVE, 27)])
def test_resume_after_a_kill_between_the_system_calls_of_a_save(call: int, reference: Reference, tmp_path: Path) -> None:
    assert faults.run(tmp_path / "run", reference.recipe, Kill("system call", call)) == [-signal.SIGKILL]
    assert_resumes(reference, tmp_path / "run")


@pytest.mark.parametrize("write", sampled(range(1, 11), 10))
def test_resume_after_a_kill_in_the_middle_of_writing_a_file(write: int, reference: Reference, tmp_path: Path) -> None:
    assert faults.run(tmp_path / "run", reference.recipe, Kill("half a write", write)) == [-signal.SIGKILL]
    assert_resumes(reference, tmp_path / "run")


@pytest.mark.parametrize("number", sampled(range(1, 5), 4))
def test_resume_after_a_kill_during_an_evaluation(number: int, reference: Reference, tmp_path: Path) -> None:
    assert faults.run(tmp_path / "run", reference.recipe, Kill("evaluation", number)) == [-signal.SIGKILL]
    assert_resumes(reference, tmp_path / "run")


@pytest.mark.parametrize("instant", sampled(range(60), 60))
def test_resume_after_a_kill_at_a_random_instant(instant: int, reference: Reference, tmp_path: Path) -> None:
    run, draws = tmp_path / "run", random.Random(instant)
    reference.outcome()
    for _ in range(2):  # a run may be killed more than once
        process = faults.spawn_run(run, reference.recipe)
        deadline = time.monotonic() + 60
        while not (run / "config.json").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draws.uniform(0, 1.2))
        process.kill()
        process.join()
    assert_resumes(reference, run)


@pytest.mark.parametrize("kill", sampled(range(1, faults.STEPS, 2), 20))
@pytest.mark.parametrize("rank", [pytest.param(0, marks=faults_only), 1])
def test_resume_of_two_processes_after_one_was_killed(kill: int, rank: int, reference: Reference, tmp_path: Path) -> None:
    """The other process soon ends too."""
    begun = time.monotonic()
    codes = faults.run(tmp_path / "run", reference.recipe, Kill("update", kill, rank), processes=2, port=free_port())
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] != 0
    assert time.monotonic() - begun < 30
    assert_resumes(reference, tmp_path / "run", processes=2)


@pytest.mark.parametrize("instant", sampled(range(20), 20))
def test_resume_of_two_processes_after_both_were_killed(instant: int, reference: Reference, tmp_path: Path) -> None:
    run, draws = tmp_path / "run", random.Random(instant)
    reference.outcome(2)
    both = faults.spawn_run_in_processes(run, reference.recipe, 2, free_port())
    deadline = time.monotonic() + 60
    while not (run / "config.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(draws.uniform(0, 1.5))
    for process in both:
        process.kill()
    for process in both:
        process.join()
    assert_resumes(reference, run, processes=2)


@pytest.mark.parametrize("step", sampled(range(1, 41, 2), 20))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_resumes(number: int, step: int, reference: Reference, tmp_path: Path) -> None:
    """The saved state is that of the step, whatever the checkpoint interval; the exit code is the usual 128 + signal."""
    run = tmp_path / "run"
    begun = time.monotonic()
    codes = faults.run(run, reference.recipe, Kill("update", step, signal=number))
    assert codes == [128 + number]
    assert time.monotonic() - begun < 10
    assert faults.saved_steps(run)[-1] == min(step + 1, faults.STEPS)
    assert_resumes(reference, run)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=faults_only), 1])
def test_a_signal_to_one_of_two_processes_stops_both(rank: int, reference: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill = Kill("update", 12, rank, signal=signal.SIGTERM)
    codes = faults.run(run, reference.recipe, kill, processes=2, port=free_port())
    assert codes == [128 + signal.SIGTERM] * 2
    assert faults.saved_steps(run)[-1] == 13
    assert_resumes(reference, run, processes=2)


def test_a_signal_during_an_evaluation_throws_it_away_and_makes_it_again(reference: Reference, tmp_path: Path) -> None:
    codes = faults.run(tmp_path / "run", reference.recipe, Kill("evaluation", 2, signal=signal.SIGTERM))
    assert codes == [128 + signal.SIGTERM]
    assert_resumes(reference, tmp_path / "run")


def test_a_second_signal_ends_at_once(reference: Reference, tmp_path: Path) -> None:
    codes = faults.run(tmp_path / "run", reference.recipe, Kill("update", 8, signal=signal.SIGTERM, times=2))
    assert codes == [-signal.SIGTERM]
    assert_resumes(reference, tmp_path / "run")


def test_a_damaged_checkpoint_is_passed_over_and_set_aside(reference: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    faults.run(run, reference.recipe, Kill("update", 23))
    newest = run / "checkpoints" / "step-000000020" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(bytes(content))
    assert faults.run(run, reference.recipe) == [0], faults.errors(run)
    assert faults.outcome(run) == reference.outcome()
    assert (run / "checkpoints" / "damaged-step-000000020").is_dir()


def resume_where_the_second_process_lacks_the_newest(folder: str, elsewhere: str) -> None:
    """Two processes with separate directories; write the error message that each gets."""
    rank = os.environ["RANK"]
    with pytest.raises(DataError) as caught:
        resume(Path(elsewhere if rank == "1" else folder), lambda event, record: None)
    Path(f"{folder}-{rank}").write_text(str(caught.value))


def test_processes_that_see_different_checkpoints_refuse_to_go_on(reference: Reference, tmp_path: Path) -> None:
    """If nodes do not share the directory, one would resume from a state that the others do not have."""
    reference.outcome()
    folders = tmp_path / "run", tmp_path / "elsewhere"
    for folder in folders:
        shutil.copytree(reference.folder / "uninterrupted-1", folder)
    shutil.rmtree(folders[1] / "checkpoints" / "step-000000040")
    two = {"processes": 2, "port": free_port()}
    faults.call(resume_where_the_second_process_lacks_the_newest, *map(str, folders), **two)
    for rank in (0, 1):
        message = (tmp_path / f"run-{rank}").read_text()
        assert "processes see different checkpoints" in message
        assert "(step-000000040, step-000000035); all nodes must share the directory" in message


def test_a_finished_run_can_be_resumed_and_stays_the_same(reference: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert faults.run(run, reference.recipe) == [0]
    assert_resumes(reference, run)


def test_at_least_two_older_checkpoints_are_kept(reference: Reference, tmp_path: Path) -> None:
    reference.outcome()
    assert faults.saved_steps(reference.folder / "uninterrupted-1") == [30, 35, 40]


def test_no_result_depends_on_the_number_of_workers(reference: Reference, tmp_path: Path) -> None:
    assert faults.run(tmp_path / "run", replace(reference.recipe, num_workers=2)) == [0]
    assert faults.outcome(tmp_path / "run") == reference.outcome()


def test_a_kill_leaves_no_worker_behind(reference: Reference, tmp_path: Path) -> None:
    recipe = replace(reference.recipe, num_workers=2)
    kill = Kill("update", 7, note=tmp_path / "workers")
    assert faults.run(tmp_path / "run", recipe, kill) == [-signal.SIGKILL]
    workers = [int(number) for number in (tmp_path / "workers").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(psutil.pid_exists(worker) for worker in workers):
        time.sleep(0.1)
    assert not any(psutil.pid_exists(worker) for worker in workers)
