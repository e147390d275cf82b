"""The launchers of real clusters, tried as far as that goes without one: sbatch's script, ssh's loop, JobSets' keys."""

import math
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from support.running import ROOT
from support.slurm_cluster import SBATCH, edited
from support.tables import every_row

from configs import command_line
from planner import clusters

JOBSET = ROOT / "launch" / "kubernetes" / "jobset.yaml"
REPLICAS = JOBSET.with_name("replicas.yaml")
TPU = JOBSET.with_name("tpu.yaml")
HOSTS = ("one", "two", "three")

# Substitutes for SLURM's commands: `srun` starts two tasks with their variables and returns the highest of their codes.
SRUN = """#!/bin/bash
[[ $1 == --kill-on-bad-exit=0 ]] || exit 99
highest=0
for task in 0 1; do
  SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost SLURM_PROCID=$task SLURM_LOCALID=$task "${@:2}" & tasks[task]=$!
done
for task in "${tasks[@]}"; do
  code=0; wait "$task" || code=$?
  highest=$((code > highest ? code : highest))
done
exit "$highest"
"""
# Has the exit code that the variable of the host's name says.
SSH = '#!/bin/bash\necho "${*: -1}" >> "$RECORD"; host=${@: -2:1}; exit "${!host}"\n'
RECORD = '#!/bin/bash\necho "$(basename "$0") $@" >> "$RECORD"\n'


def run_sbatch(folder: Path, program: str, script: str = "train", **environment: str) -> tuple[int, str]:
    """Runs a script's body with `program` in the user's place; returns (exit code, requests to SLURM)."""
    for name, text in (("srun", SRUN), ("scontrol", RECORD), ("scancel", RECORD)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    record = folder / "record"
    record.unlink(missing_ok=True)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run(
        ["bash", "-c", edited(f"{program} --workdir={folder}", SBATCH.with_stem(script))],
        cwd=ROOT,
        env={**os.environ, **variables, "SLURM_JOB_ID": "4711", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, record.read_text() if record.exists() else ""


@every_row(
    ("codes", "restarts", "code", "requeued"),
    [
        ("0 0", 0, 0, False),
        ("75 75", 0, 75, True),
        ("2 75", 99, 75, True),  # a run that can continue is not given up because of earlier restarts
        ("137 75", 0, 137, True),  # one was killed, the other noticed
        ("137 75", 5, 137, False),  # again and again
        ("2 2", 0, 2, False),
        ("1 1", 0, 1, False),
    ],
)
def test_sbatch_requeues_what_can_go_on(codes: str, restarts: int, code: int, requeued: bool, tmp_path: Path) -> None:
    program = f"bash -c 'codes=({codes}); exit ${{codes[SLURM_PROCID]}}'"
    outcome = run_sbatch(tmp_path, program, SLURM_RESTART_COUNT=str(restarts))
    assert outcome == (code, "scontrol requeue 4711\n" if requeued else "")


@pytest.mark.slow  # it starts bash 46 times
@pytest.mark.parametrize(("script", "own"), [("train", "."), ("replicas", "replicas/1")])
def test_sbatch_gives_up_what_stops_without_a_step_again_and_again(script: str, own: str, tmp_path: Path) -> None:
    """A node is broken, and the others wait for it; a step between two stops ends the row, and so does a signal."""
    stops, dies = "bash -c 'exit 75'", "bash -c 'exit 137'"
    steps = f"bash -c 'echo >> {tmp_path / own}/metrics.jsonl; exit 75'"
    runs = [(stops, "1")] * 6 + [(steps, "1"), (stops, "1")] + [(stops, "2")] * 4 + [(stops, "2"), (stops, "0")]
    runs += [(stops, "1")] * 3 + [(dies, "1")] + [(stops, "1")] * 5
    found = []
    for program, count in runs:
        words = {"SLURM_RESTART_COUNT": count, "SLURM_ARRAY_TASK_ID": "1"}
        found.append(run_sbatch(tmp_path, program, script, **words)[1].count("requeue"))
    assert found[:13] == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]
    assert found[13:] == [1] * 10, "one that is submitted anew begins to count anew"


@every_row("script", ["train", "replicas"])
def test_srun_gets_the_cores_that_sbatch_was_asked_for(script: str, tmp_path: Path) -> None:
    program = "bash -c 'exit ${SRUN_CPUS_PER_TASK-3}'"
    assert run_sbatch(tmp_path, program, script, SLURM_CPUS_PER_TASK="8")[0] == 8
    assert run_sbatch(tmp_path, program, script)[0] == 3  # it was not asked for any


SETTINGS = "[[ $XLA_PYTHON_CLIENT_MEM_FRACTION == 0.9 && $MICS_JAX_CACHE == $PWD/runs/cache ]]"


@every_row("script", ["train", "replicas"])
def test_sbatch_gives_programs_the_memory_that_plans_assume(script: str, tmp_path: Path) -> None:
    """And the cache a folder that all nodes see, unless the user has one."""
    assert clusters.MEMORY_SHARE == 0.9
    assert run_sbatch(tmp_path, f"bash -c '{SETTINGS}'", script, MICS_JAX_CACHE="")[0] == 0
    assert run_sbatch(tmp_path, "bash -c '[[ $MICS_JAX_CACHE == own ]]'", script, MICS_JAX_CACHE="own")[0] == 0


@every_row("script", ["train", "replicas"])
def test_sbatch_needs_the_directory_of_the_program(script: str, tmp_path: Path) -> None:
    command = ["bash", "-c", edited("true", SBATCH.with_stem(script))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and done.stderr.endswith("workdir: the program has no --workdir=DIR\n")


@every_row(("code", "cancelled"), [(75, False), (0, True), (2, True)])
def test_an_array_of_jobs_ends_with_the_run(code: int, cancelled: bool, tmp_path: Path) -> None:
    """Its next task is the restart; if nothing is left to continue, the waiting tasks are cancelled."""
    outcome = run_sbatch(tmp_path, f"bash -c 'exit {code}'", SLURM_ARRAY_JOB_ID="4700")
    assert outcome == (code, "scancel --state=PENDING 4700\n" if cancelled else "")


def test_sbatch_directives_come_first() -> None:
    """SLURM reads them up to the first command; none may follow it."""
    lines = SBATCH.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert max(directives) < first_command
    options = dict(re.fullmatch(r"#SBATCH --([a-z-]+)=?(\S*)", lines[i]).groups() for i in directives)  # pyright: ignore
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"] == "TERM@180" and options["requeue"] == ""


@every_row(("codes", "code"), [("0 0 0", 0), ("75 75 255", 75), ("255 75 75", 75), ("255 255 0", 255), ("2 2 255", 2)])
def test_the_loop_over_ssh_starts_each_host_and_says_how_the_run_ended(codes: str, code: int, tmp_path: Path) -> None:
    """An ssh that lost its host knows nothing of the run; `hosts` may have an empty line, and no newline at its end."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    (loop,) = re.findall(r"(?m)^    hosts=.*(?:\n    .*)*", page)
    (tmp_path / "record").unlink(missing_ok=True)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(stat.S_IRWXU)
    (tmp_path / "hosts").write_text("one\n\ntwo\nthree")
    words = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": "record", **dict(zip(HOSTS, codes.split()))}
    done = subprocess.run(["bash", "-c", loop], cwd=tmp_path, env=words, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"exit code {code}\n", "")
    sent = sorted((tmp_path / "record").read_text().splitlines())
    flags = [re.search(r" --coordinator=one:29400 --num_processes=3 --process_id=(\d)$", line) for line in sent]
    assert [flag[1] for flag in flags if flag] == ["0", "1", "2"]
    (pattern,) = re.findall(r"pkill -f '(.*)'", page)  # ends the program, and not the ssh that started it
    assert all(re.search(pattern, line.partition(" exec ")[2]) for line in sent)
    assert not any(re.search(pattern, f"ssh one {line}") for line in sent)


def manifest(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text().replace("GROUP", "3"))  # as its first lines have it


def replica_on_tpus(group: int) -> dict[str, Any]:
    """Returns the manifest that the first lines of the file for TPUs make of it for a replica."""
    (loop,) = re.findall(r"(?m)^#     for group in 0 1; do\n(?:#  .*\n)+", TPU.read_text())
    script = re.sub(r"(?m)^# ", "", loop).replace("kubectl apply --server-side -f -", "cat").replace("0 1", f"{group}")
    return yaml.safe_load(subprocess.run(["bash", "-c", script], cwd=ROOT, check=True, capture_output=True).stdout)


@pytest.fixture(params=[JOBSET, REPLICAS], ids=lambda file: file.stem)
def jobset(request: pytest.FixtureRequest) -> dict[str, Any]:
    return manifest(request.param)


@every_row("jobset", [manifest(JOBSET), manifest(REPLICAS), manifest(TPU), replica_on_tpus(1)])
def test_jobset_has_known_fields_only(jobset: dict[str, Any]) -> None:
    """By the models that Kubernetes, and for what is around its Jobs Kubeflow, generate from the published schemas."""
    for job in jobset["spec"]["replicatedJobs"]:
        client.V1JobTemplateSpec.model_validate(job["template"])  # strict: types, required fields, none unknown
        job["template"] = {}
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # takes seconds

    known = JobsetV1alpha2JobSet.model_validate(jobset).model_dump(by_alias=True, exclude_none=True)
    assert known == jobset  # an unknown field would be gone
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and jobset["kind"] == "JobSet"
    actions = {rule["action"] for rule in jobset["spec"]["failurePolicy"]["rules"]}
    assert actions <= {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}


def test_commented_lines_fit_too() -> None:
    """Lines that a user may uncomment: everything after `# ` that is YAML, not a sentence."""
    text, found = re.subn(r"^( +)# (?=[- ]|\S+: \S|securityContext:)(?!.*:$)", r"\1", JOBSET.read_text(), flags=re.M)
    assert found == 6
    client.V1JobTemplateSpec.model_validate(yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"])


def test_jobset_fits_together(jobset: dict[str, Any]) -> None:
    """Numbers that must be equal, names that refer to each other, and the requirements of Jobs."""
    spec = jobset["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {variable["name"]: variable for variable in container["env"]}
    assert spec["coordinator"]["replicatedJob"] == replicated["name"] and replicated["replicas"] == 1
    assert job["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"  # podFailurePolicy needs Never
    assert str(job["parallelism"]) == str(job["completions"]) == environment["JAX_NUM_PROCESSES"]["value"]
    address = environment["JAX_COORDINATOR_ADDRESS"]["value"]
    assert address == f"$(COORDINATOR):{container['ports'][0]['containerPort']}"
    assert list(environment).index("COORDINATOR") < list(environment).index("JAX_COORDINATOR_ADDRESS")
    rules = job["podFailurePolicy"]["rules"]
    resumable = rules[0]["onExitCodes"]
    assert (resumable["containerName"], resumable["values"], rules[0]["action"]) == (container["name"], [75], "FailJob")
    assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert float(environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]["value"]) == clusters.MEMORY_SHARE
    paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {*paths} == {volume["name"] for volume in pod["volumes"]}
    assert Path(environment["MICS_JAX_CACHE"]["value"]).is_relative_to(paths["runs"])  # a pod's own ends with it


def test_each_replica_has_a_number_and_a_jobset() -> None:
    """The manifests that `sed` makes for two groups differ only in the JobSet's name and in `--group`."""
    (loop,) = re.findall(r"sed \"s/(\w+)/\$group/\" launch/kubernetes/replicas.yaml", REPLICAS.read_text())
    made = [re.sub(loop, group, yaml.safe_dump(yaml.safe_load(REPLICAS.read_text()))).splitlines() for group in "03"]
    for first, second in (made, [yaml.safe_dump(replica_on_tpus(group)).splitlines() for group in (0, 3)]):
        differ = [(one.strip(" -"), two.strip(" -")) for one, two in zip(first, second, strict=True) if one != two]
        assert sorted(differ) == [("group=0", "group=3"), ("name: mics-0", "name: mics-3")]
        flags = [line.strip(" -") for line in first]
        assert "config.sharding.replicas=independent" in flags and "workdir=/runs/mics" in flags


@every_row(("jobset", "slices"), [(manifest(TPU), 2), (replica_on_tpus(1), 1)])
def test_a_tpu_jobset_fits_together(jobset: dict[str, Any], slices: int) -> None:
    """Whole slices, restarts as on GPUs, and a bucket that holds the checkpoints and the compiled programs.

    GKE's variables give a process its place (test_train_launchers.py); ours would replace them.
    """
    spec, on_gpus = jobset["spec"], manifest(JOBSET)["spec"]
    (replicated,), (gpu_replicated,) = spec["replicatedJobs"], on_gpus["replicatedJobs"]
    job, gpu_job = replicated["template"]["spec"], gpu_replicated["template"]["spec"]
    pod, gpu_pod = job["template"]["spec"], gpu_job["template"]["spec"]
    (container,) = pod["containers"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert replicated["replicas"] == slices
    assert job["parallelism"] == job["completions"] == chips / int(container["resources"]["limits"]["google.com/tpu"])
    assert (spec["failurePolicy"], spec["network"]) == (on_gpus["failurePolicy"], on_gpus["network"])
    same = ("completionMode", "backoffLimit", "podFailurePolicy")
    assert [job[key] for key in same] == [gpu_job[key] for key in same] and container["name"] == "train"
    same = ("restartPolicy", "terminationGracePeriodSeconds")
    assert [pod[key] for key in same] == [gpu_pod[key] for key in same]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert not any(name.startswith(("JAX_", "TPU_", "MEGASCALE_")) for name in environment)
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    (workdir,) = (word.partition("=")[2] for word in container["command"] if word.startswith("--workdir="))
    assert volume["name"] == mount["name"] and volume["csi"]["driver"] == "gcsfuse.csi.storage.gke.io"
    assert all(Path(path).is_relative_to(mount["mountPath"]) for path in (workdir, environment["MICS_JAX_CACHE"]))
    assert "file-mode=0600" in volume["csi"]["volumeAttributes"]["mountOptions"]
    config = command_line.parse(["train.py", *command_line.words_of_config(container["command"][1:])])
    assert config.mesh.num_cpu_devices == config.mesh.devices_per_node == 0
    assert config.batch.global_size % (2 * chips * config.batch.micro_size) == 0
    assert config.elastic.snapshot_every == 0  # a folder of gcsfuse is another run after each mount
    assert (config.sharding.replicas == "independent") == ("--group=1" in container["command"]) == (slices == 1)
