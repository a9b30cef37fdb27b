"""If these fail, a job asks for the wrong machines, or a cut run stays cut, is queued for ever, or can't be cancelled.

The script runs here with stand-ins for Slurm's commands; with a real Slurm in tests/slurm.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from miras_launch.cluster import Cluster
from miras_launch.main import main
from miras_launch.points import points_of
from miras_launch.slurm import Job, job_of

from miras_megatron.config.errors import ConfigError
from miras_megatron.config.load import load_run

DEBUG = str(Path(__file__).resolve().parents[2] / "configs/runs/debug_cpu.yaml")
TINY = Cluster(nodes=1, ranks_per_node=2, gpus_per_node=0, doctor=False, max_requeues=2)


def job(cluster: Cluster = TINY, *sweep: str, words: tuple[str, ...] = ()) -> Job:
    own = [DEBUG, *words]
    run = load_run(own)
    return job_of(points_of(own, DEBUG, run, sweep, cluster.world_size), run, cluster, "mine.yaml")


def written(made: Job) -> list[Path]:
    """The files of a job, where its script looks for them."""
    for path, text in made.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(made.files)


def started(place: Path, script: str, **variables: str) -> subprocess.Popen[str]:
    """The job's script, as slurmd would start it."""
    (place / "runs/debug_cpu/checkpoints").mkdir(parents=True, exist_ok=True)
    (place / "job.sbatch").write_text(script)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SAVED": "0", "CODE": "0", "RUN": "runs/debug_cpu"}
    return subprocess.Popen(
        ["bash", "job.sbatch"], cwd=place, env=os.environ | given | variables, stdout=subprocess.PIPE, text=True
    )


def ran(place: Path, script: str | None = None, **variables: str) -> tuple[int, str, str]:
    """Exit code of the script, what it said, and Slurm's commands that it called."""
    process = started(place, script or job().script, **variables)
    said, _ = process.communicate(timeout=60)
    calls = place / "calls"
    return process.returncode, said, calls.read_text() if calls.exists() else ""


def latest(place: Path, text: str) -> None:
    """What `latest` says before a start."""
    (place / "runs/debug_cpu/checkpoints").mkdir(parents=True, exist_ok=True)
    (place / "runs/debug_cpu/checkpoints/latest").write_text(text)


def test_slurm_is_asked_for_what_the_cluster_says(place: Path) -> None:
    """A wrong line costs a day in the queue."""
    cluster = Cluster(
        nodes=8,
        cpus_per_rank=12,
        memory_per_node="0",
        partition="gpu",
        account="lab",
        time_limit="1-00:00:00",
        options=["--qos=long"],
        container="image.sqsh",
        container_mounts=["/data:/data"],
        setup=["module load cuda"],
        environment={"NCCL_DEBUG": "WARN", "HOME_OF": "$HOME/x"},
        cache="/tmp/$USER",
    )
    script = job(cluster, words=("--training.micro_batch=1", "--training.global_batch=64")).script
    asked = re.findall(r"^#SBATCH (.*)", script, re.MULTILINE)
    assert asked == [
        *("--job-name=debug_cpu", "--nodes=8", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=12"),
        *("--mem=0", "--partition=gpu", "--account=lab", "--time=1-00:00:00", "--signal=B:USR1@300", "--requeue"),
        *("--open-mode=append", f"--output={place}/runs/debug_cpu/logs/job_%j.log", "--qos=long"),
    ]
    assert "\nmodule load cuda\n" in script
    assert 'export NCCL_DEBUG="WARN"\nexport HOME_OF="$HOME/x"\n' in script
    step = "--cpus-per-task=12 --container-image=image.sqsh --container-mounts=/data:/data"
    assert script.count(step) == 1 and '--data.cache="/tmp/$USER"' in script
    assert 'miras-doctor --shared="$run_dir" --free-gib=10 --cache="/tmp/$USER" --gpus=8' in script


def test_the_script_names_neither_ssh_nor_hosts() -> None:
    """Ranks find each other by Slurm's variables; machines that forbid ssh between nodes must do."""
    script = job().script
    assert not re.search(r"\bssh\b|hostfile|pdsh|MASTER_ADDR|torchrun", script)


def test_the_job_trains_what_was_checked(place: Path) -> None:
    """The resolved configuration lies beside the script: a later edit of configs/runs doesn't change a queued job."""
    made = job(words=("--model.layers=3", "--training.micro_batch=1"))
    assert made.path == Path("runs/debug_cpu/launch/job.sbatch")
    (path,) = written(made)
    assert load_run([str(path)]) == load_run([DEBUG, "--model.layers=3", "--training.micro_batch=1"])
    _, _, calls = ran(place, made.script)
    assert f"miras-train {path} --checkpoint.resume=auto" in calls


def test_launching_again_leaves_the_files_of_queued_jobs_alone(place: Path) -> None:
    """A job that waits must train what it was submitted with; Slurm keeps its script, and that names its files."""
    queued = job(words=("--training.micro_batch=1",))
    (before,) = written(queued)
    text = before.read_text()
    (after,) = written(job(words=("--training.micro_batch=1", "--model.layers=3")))
    assert after != before and before.read_text() == text
    assert written(job(words=("--training.micro_batch=1",))) == [before], "the same run has the same file"
    _, _, calls = ran(place, queued.script)
    assert f"miras-train {before} " in calls


@pytest.mark.parametrize("wish", ["never", "a b/checkpoints/step_00000010"])
def test_what_is_said_of_resuming_is_said_of_the_first_start(place: Path, wish: str) -> None:
    """A job that is queued again goes on from its own checkpoint: never from where it once began, nor refused."""
    made = job(words=(f"--checkpoint.resume={wish}", "--training.micro_batch=1"))
    (path,) = written(made)
    assert load_run([str(path)]).checkpoint.resume == "auto"
    _, _, calls = ran(place, made.script, SAVED="17", CODE="4")
    assert f"--checkpoint.resume={wish}\n" in calls
    (place / "calls").unlink()
    _, _, calls = ran(place, made.script, SAVED="18", CODE="4", SLURM_RESTART_COUNT="1")
    assert "--checkpoint.resume=auto\n" in calls


def test_a_named_checkpoint_is_named_until_the_run_has_its_own(place: Path) -> None:
    """A first start that died early must not have the second begin at step 0."""
    made = job(words=("--checkpoint.resume=other/step_00000010", "--training.micro_batch=1"))
    _, _, calls = ran(place, made.script, SLURM_RESTART_COUNT="1")
    assert "--checkpoint.resume=other/step_00000010\n" in calls


def test_a_run_that_is_through_ends_with_0(place: Path) -> None:
    """Nothing is queued again, and the log says where everything lies."""
    code, said, calls = ran(place, SAVED="40")
    assert code == 0 and "through: 40 steps" in said and "scontrol" not in calls
    assert "rank 0 said last:\nmiras-train: as it went" in said


def test_a_run_that_was_through_before_starts_no_ranks(place: Path) -> None:
    """A sweep that is submitted again costs its finished points nothing."""
    ran(place, SAVED="40")
    (place / "calls").unlink()
    code, said, calls = ran(place)
    assert code == 0 and "nothing left to do" in said and calls == ""


def test_a_warned_job_has_its_ranks_save_and_queues_itself(place: Path) -> None:
    """This is how a run of weeks gets through a partition of a day."""
    process = started(place, job().script, SAVED="17", SECONDS_OF_WORK="30")
    calls = place / "calls"
    end = time.monotonic() + 20
    while not (calls.exists() and "srun" in calls.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert (
        "asked to save and stop" in said
        and "saved at step 17 of 40; into the queue again, start 2 of at most 3" in said
    )
    assert calls.read_text().splitlines()[1:] == ["warned", "scontrol requeue 7"]


@pytest.mark.parametrize("code", ["4", "137", "143"])
def test_a_lost_rank_queues_the_job_again(place: Path, code: str) -> None:
    """4: the ranks say that one is lost; above 128 it is the signal that killed one, whichever Slurm tells."""
    returned, said, calls = ran(place, CODE=code)
    assert returned == 0 and "scontrol requeue 7" in calls
    assert "and of all ranks:\n" in said


def test_new_starts_are_bounded(place: Path) -> None:
    """A machine that always fails must not keep a job in the queue for ever."""
    code, said, calls = ran(place, CODE="4", SLURM_RESTART_COUNT="2")
    assert code == 4 and "started again 2 times already" in said and "scontrol" not in calls


def test_a_log_counts_one_as_one(place: Path) -> None:
    """ "1 x 1 ranks" and "1 times" read as a program that nobody has looked at."""
    script = job(replace(TINY, ranks_per_node=1, max_requeues=1), words=("--training.steps=1",)).script
    _, said, _ = ran(place, script, CODE="4", SLURM_RESTART_COUNT="1")
    assert "start 2 on n[1-2]: 1 node of 1 rank; at step 0 of 1" in said and "started again 1 time already" in said
    _, said, _ = ran(place, script, SAVED="1")
    assert "through: 1 step, everything" in said


@pytest.mark.parametrize("code", ["1", "2", "3"])
def test_what_must_be_mended_is_not_tried_again(place: Path, code: str) -> None:
    """A wrong configuration or a loss that is no number stays so."""
    returned, said, calls = ran(place, CODE=code)
    assert returned == int(code) and f"ends with exit code {code}" in said and "scontrol" not in calls


@pytest.mark.parametrize("first", ["2", "3"])
def test_the_code_is_the_first_causes_not_the_victims(place: Path, first: str) -> None:
    """One rank finds something to mend; those that lose it end later, with 4, and one that hangs is killed by srun."""
    words = 'for w in "$@"; do case "$w" in --kill-on-bad-exit=1) exit 143;; esac; done'  # as srun does
    staggered = f'{words}; (sleep 0.1; echo {first} > "$MIRAS_EXIT_CODE") & (sleep 0.3) & wait; exit 137'
    (place / "bin/srun").write_text(f"#!/bin/bash\n{staggered}\n")
    code, said, calls = ran(place)
    assert code == int(first) and f"ends with exit code {first}" in said and "scontrol" not in calls
    (place / "bin/srun").write_text("#!/bin/bash\nexit 4\n")
    code, said, calls = ran(place)
    assert code == 0 and "scontrol requeue 7" in calls, "what an earlier start said is no cause of this one's end"


def test_a_cancelled_job_stays_cancelled(place: Path) -> None:
    """scancel kills ranks too; a job that then queued itself again could not be stopped."""
    code, said, calls = ran(place, CODE="143", STATE="COMPLETING")
    assert code == 143 and "cancelled, so it stays" in said and "scontrol" not in calls


def test_slurm_is_asked_again_before_a_job_is_taken_for_running(place: Path) -> None:
    """A busy controller that doesn't answer once must neither end a run nor bring a cancelled one back."""
    (place / "bin/squeue").write_text("#!/bin/bash\n[ -e asked ] && echo COMPLETING || { touch asked; exit 1; }\n")
    code, said, calls = ran(place, CODE="143")
    assert code == 143 and "cancelled, so it stays" in said and "scontrol" not in calls


def test_ranks_that_were_asked_themselves_are_queued_again_too(place: Path) -> None:
    """Some sites warn every task: the ranks save and leave with 0, and the run is far from through."""
    code, said, calls = ran(place, SAVED="17", CODE="0")
    assert code == 0 and "saved at step 17 of 40; into the queue again" in said and "scontrol requeue 7" in calls
    code, _, calls = ran(place, SAVED="18", CODE="0", STATE="COMPLETING")
    assert code == 5, "cancelled: not 0, which means through"


def test_a_warning_during_the_preflight_starts_no_training(place: Path) -> None:
    """A thousand ranks that load a model to be told to stop are killed while they do."""
    process = started(place, job(replace(TINY, doctor=True)).script, SAVED="17", SECONDS_OF_WORK="30")
    calls = place / "calls"
    end = time.monotonic() + 20
    while not (calls.exists() and "miras-doctor" in calls.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "miras-train" not in calls.read_text()
    assert "into the queue again" in said and "scontrol requeue 7" in calls.read_text()


@pytest.mark.parametrize("text", ["", "rubbish", "step_", "step_1x", "step_-3", "step_a[$(touch ran)]"])
def test_a_broken_latest_is_no_step(place: Path, text: str) -> None:
    """A write that was cut must not end the job in shell's arithmetic, or be run there."""
    latest(place, text)
    code, said, calls = ran(place, SAVED="40")
    assert code == 0 and "at step 0 of 40" in said and "srun" in calls and not (place / "ran").exists()


def test_a_machine_that_always_dies_costs_three_new_starts(place: Path) -> None:
    """Not max_requeues of them; a start that saved something new begins the count again."""
    script = job(replace(TINY, max_requeues=20)).script
    codes = [ran(place, script, SAVED="0", CODE="137", SLURM_RESTART_COUNT=str(start))[0] for start in range(2)]
    codes.append(ran(place, script, SAVED="5", CODE="137", SLURM_RESTART_COUNT="2")[0])
    codes += [ran(place, script, SAVED="5", CODE="137", SLURM_RESTART_COUNT=str(start))[0] for start in (3, 4, 5)]
    assert codes == [0] * 6
    code, said, _ = ran(place, script, SAVED="5", CODE="137", SLURM_RESTART_COUNT="6")
    assert code == 137 and "at step 5 of 40 as 4 starts ago, so no more" in said


def test_only_this_layouts_ranks_are_quoted(place: Path) -> None:
    """What rank 7 said before the run went to two ranks is no news of them."""
    logs = place / "runs/debug_cpu/logs"
    logs.mkdir(parents=True)
    (logs / "rank_7.log").write_text("miras-train: long ago\n")
    (logs / "rank_1.log").write_text("miras-train: rank 1: now\n")
    _, said, _ = ran(place, CODE="4")
    assert "rank 1: now" in said and "long ago" not in said


def test_a_folders_percent_sign_is_no_pattern(place: Path) -> None:
    """Slurm fills % in: the logs of runs/50%j would lie in a folder of the job's number."""
    made = job(words=("--run.dir=runs/50%j", "--training.micro_batch=1"))
    assert f"--output={place}/runs/50%%j/logs/job_%j.log" in made.script
    _, _, calls = ran(place, made.script)
    assert "--output=runs/50%%j/logs/rank_%t.log" in calls


@pytest.mark.parametrize("field", ["run.name", "run.dir"])
def test_a_name_of_several_lines_is_refused(field: str) -> None:
    """Its second line would be a command of the job."""
    with pytest.raises(ConfigError, match=rf"{field} = 'a\\ntouch b': holds a line break"):
        job(words=(f"--{field}=a\ntouch b", "--training.micro_batch=1"))


def test_a_machine_that_may_not_ask_slurm_queues_the_job_all_the_same(place: Path) -> None:
    """On some sites squeue works on login nodes only; a lost rank must not end the run there."""
    code, _, calls = ran(place, CODE="4", STATE="unknown")
    assert code == 0 and "scontrol requeue 7" in calls


def test_a_sites_setup_may_read_variables_that_are_not_there(place: Path) -> None:
    """Scripts that sites have users source do; the job must not end at them."""
    code, said, _ = ran(place, job(replace(TINY, setup=['echo "loads $NOT_THERE"'])).script, SAVED="40")
    assert code == 0 and "through: 40 steps" in said


@pytest.mark.parametrize("doctor", [True, False])
def test_a_cache_of_a_variable_that_is_not_set_is_said(place: Path, doctor: bool) -> None:
    """The job ended with 1, a fault of the program, and a line of bash in no log that anybody reads."""
    made = job(replace(TINY, cache="/tmp/${NOT_THERE}/it's $USER_OF_IT", doctor=doctor)).script
    code, said, calls = ran(place, made, USER_OF_IT="me")
    told = (
        """cache = "/tmp/${NOT_THERE}/it's $USER_OF_IT" in mine.yaml: $NOT_THERE isn't set on this machine; set it in"""
    )
    assert code == 2 and told in said and "srun" not in calls
    code, _, calls = ran(place, made, USER_OF_IT="me", NOT_THERE="", SAVED="40")
    assert code == 0 and "--data.cache=/tmp//it's me" in calls, "one that is empty is set"


def test_a_cache_of_the_command_line_needs_no_variable_of_the_clusters(place: Path) -> None:
    """The cluster's isn't used then."""
    made = job(replace(TINY, cache="/tmp/$NOT_THERE"), words=("--data.cache=mine",))
    assert ran(place, made.script, SAVED="40")[0] == 0


def test_a_machine_at_fault_stops_the_job_before_training(place: Path) -> None:
    """The preflight is there so that hours of a thousand GPUs aren't spent to find it."""
    code, said, calls = ran(place, job(replace(TINY, doctor=True)).script, CODE="1")
    assert code == 6 and calls.count("srun") == 1 and "miras-doctor" in calls, "1 is a fault of the program"
    assert "miras-doctor ended with exit code 1, so nothing is trained" in said


def test_a_sweep_is_an_array_whose_tasks_pick_their_line(place: Path) -> None:
    """Task n trains point n; its requeue names itself, since the array's number would mean all of them."""
    made = job(TINY, "optimizer.lr=1e-3,2e-3,3e-3", words=("--training.micro_batch=1",))
    assert "#SBATCH --array=0,1,2\n" in made.script and "job_%A_%a.log" in made.script
    folder, second = "runs/debug_cpu/lr=2e-3", written(made)[1]
    assert load_run([str(second)]).optimizer.lr == 2e-3 and second.parent == Path(folder, "launch")
    (place / folder / "checkpoints").mkdir()
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "8", "RUN": folder}
    code, said, calls = ran(place, made.script, CODE="4", **array)
    assert code == 0 and f"miras-train {second} " in calls and "scontrol requeue 7_1" in calls
    (place / folder / "checkpoints/latest").write_text("step_00000040")
    again = job(TINY, "optimizer.lr=1e-3,2e-3,3e-3", words=("--training.micro_batch=1",))
    assert "#SBATCH --array=0,2\n" in again.script and again.open == 2


def test_a_cache_on_the_command_line_wins(place: Path) -> None:
    """The user knows better than the site where there is room; and the doctor looks there."""
    made = job(replace(TINY, cache="/site", doctor=True), words=("--data.cache=/mi ne", "--training.micro_batch=1"))
    assert "/site" not in made.script and "--cache='/mi ne'" in made.script and "--data.cache" not in made.script
    (path,) = written(made)
    assert load_run([str(path)]).data.cache == "/mi ne"


def test_a_dry_run_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is for looking; the script that it prints is the one that would be submitted."""
    assert main([DEBUG, "--cluster=slurm_cpu", "--training.micro_batch=1", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert not (place / "runs").exists()
    assert (
        "memory a rank: at least" in told and "script: runs/debug_cpu/launch/job.sbatch\n\n#!/usr/bin/env bash" in told
    )
    script = told[told.index("#!/usr/bin/env bash") :]
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=20).returncode == 0


@pytest.mark.parametrize("folder", ["-x", "./-x"])
def test_a_folder_that_looks_like_an_option_is_refused(place: Path, folder: str) -> None:
    """Else sbatch, and mkdir in the script, end with what they say of an unknown option."""
    told = rf"run\.dir = '{folder}': programs take it for an option; put it in a folder: runs/-x"
    with pytest.raises(ConfigError, match=told):
        job(words=(f"--run.dir={folder}", "--training.micro_batch=1"))
    assert "run_dir=runs/-x " in job(words=("--run.dir=runs/-x", "--training.micro_batch=1")).script
