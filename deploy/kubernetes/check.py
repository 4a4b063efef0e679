"""Checks mpijob.yaml and volume-claim.yaml, and that broken ones are refused: `python check.py` (kubernetes-validate, PyYAML).

The MPIJob is checked against mpijob.schema.json, its pod templates as pods against Kubernetes' own schemas, and then for what
schemas cannot say: that numbers in it agree, and that what is mounted is there. Exit code 0, or 1 with what is wrong.
"""

import copy
import json
import pathlib
import re
import sys

import jsonschema
import kubernetes_validate
import yaml

FOLDER = pathlib.Path(__file__).parent
# Kubernetes' schemas to check against: the oldest and the newest of those in use.
VERSIONS = ["1.28", "1.37"]


class Loader(yaml.SafeLoader):
    """YAML in which a key that is there twice is an error, as it is for kubectl's strict validation."""


def mapping(loader, node):
    pairs = [(loader.construct_object(key), loader.construct_object(value, deep=True)) for key, value in node.value]
    keys = [key for key, _ in pairs]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise yaml.constructor.ConstructorError(None, None, f"duplicate keys: {sorted(twice)}", node.start_mark)
    return dict(pairs)


Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)


class Wrong(Exception):
    pass


def require(holds, message):
    if not holds:
        raise Wrong(message)


def kubernetes(resource, where):
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = "/".join(str(part) for part in error.absolute_path)
            raise Wrong(f"{where}: Kubernetes {version}: {path}: {error.message}") from error


def quantity(text):
    """A number of Kubernetes, such as 500m or 16Gi."""
    match = re.fullmatch(r"([0-9.]+)(m|Ki|Mi|Gi|Ti)?", str(text))
    require(match, f"'{text}' is not a quantity")
    unit = {None: 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}[match[2]]
    return float(match[1]) * unit


def option(words, name):
    match = re.search(rf"{name}[ =](\d+)", words)
    require(match, f"the launcher's command has no {name} N")
    return int(match[1])


def check(job, claim):
    schema = json.loads((FOLDER / "mpijob.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    try:
        jsonschema.Draft202012Validator(schema).validate(job)
    except jsonschema.ValidationError as error:
        path = "/".join(str(part) for part in error.absolute_path)
        raise Wrong(f"{path}: {error.message}") from error
    kubernetes(claim, "volume-claim.yaml")

    spec = job["spec"]
    for role, replicas in spec["mpiReplicaSpecs"].items():
        template = replicas["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template.get("metadata", {}), "spec": template["spec"]}
        kubernetes(pod, role)
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for volume in volumes.values():
            name = volume.get("persistentVolumeClaim", {}).get("claimName", claim["metadata"]["name"])
            require(name == claim["metadata"]["name"], f"{role}: volume-claim.yaml has no claim {name}")
        for container in pod["spec"]["containers"]:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            require(mounted <= volumes.keys(), f"{role}: no volume for {mounted - volumes.keys()}")
            resources = container.get("resources", {})
            for kind in ["cpu", "memory"]:
                asked = resources.get("requests", {}).get(kind)
                limit = resources.get("limits", {}).get(kind)
                require(asked and asked == limit, f"{role}: {kind}: requests are not limits")

    launcher, worker = (spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ["Launcher", "Worker"])
    command = launcher["containers"][0]["args"][0]
    slots = spec.get("slotsPerWorker", 1)
    ranks = slots * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    require(option(command, "--ranks") == ranks, f"--ranks is not replicas x slotsPerWorker, {ranks}")
    limits = worker["containers"][0]["resources"]["limits"]
    cores = quantity(limits["cpu"])
    require(option(command, "--threads") * slots == cores, f"--threads is not a share of the workers' cpu, {cores:.0f}")
    shm = [volume["emptyDir"] for volume in worker["volumes"] if volume["name"] == "shm"]
    require(shm and shm[0]["medium"] == "Memory", "the workers' /dev/shm is not in memory")
    require(quantity(shm[0]["sizeLimit"]) < quantity(limits["memory"]), "/dev/shm takes all of the workers' memory")
    require(spec["sshAuthMountPath"] in " ".join(worker["containers"][0]["args"]), "sshd's key is not where keys are")


def broken(job):
    """Jobs with one mistake each: what it is, a part of the message that is expected, the job."""

    def change(what, message, edit):
        changed = copy.deepcopy(job)
        edit(changed)
        return what, message, changed

    def replicas(job, role="Worker"):
        return job["spec"]["mpiReplicaSpecs"][role]

    def container(job):
        return replicas(job)["template"]["spec"]["containers"][0]

    def fewer_cores(job):
        half = {"cpu": "4", "memory": "16Gi"}
        container(job)["resources"] = {"requests": half, "limits": half}

    return [
        change("no launcher", "'Launcher' is a required", lambda job: job["spec"]["mpiReplicaSpecs"].pop("Launcher")),
        change("an unknown role", "'worker' was unexpected",
               lambda job: job["spec"]["mpiReplicaSpecs"].update(worker=replicas(job))),
        change("two launchers", "1 was expected", lambda job: replicas(job, "Launcher").update(replicas=2)),
        change("slotsPerWorker misspelt", "'slotsPerWorkers' was unexpected",
               lambda job: job["spec"].update(slotsPerWorkers=job["spec"].pop("slotsPerWorker"))),
        change("slotsPerWorker as a string", "'2' is not of type 'integer'",
               lambda job: job["spec"].update(slotsPerWorker="2")),
        change("cleanPodPolicy outside of runPolicy", "'cleanPodPolicy' was unexpected",
               lambda job: job["spec"].update(cleanPodPolicy="Running")),
        change("an unknown cleanPodPolicy", "'Completed' is not one of",
               lambda job: job["spec"]["runPolicy"].update(cleanPodPolicy="Completed")),
        change("a negative backoffLimit", "less than the minimum",
               lambda job: job["spec"]["runPolicy"].update(backoffLimit=-1)),
        change("the older version", "'kubeflow.org/v2beta1' was expected",
               lambda job: job.update(apiVersion="kubeflow.org/v1")),
        change("a name that is not a valid host name", "does not match", lambda job: job["metadata"].update(name="Zero_GPT2")),
        change("a template without spec", "'spec' is a required", lambda job: replicas(job)["template"].pop("spec")),
        change("a misspelt key of a container", "'volumeMount' was unexpected",
               lambda job: container(job).update(volumeMount=[])),
        change("a wrong type in a pod", "not of type",
               lambda job: container(job)["ports"][0].update(containerPort="ssh")),
        change("a container without name", "'name' is a required", lambda job: container(job).pop("name")),
        change("a missing volume", "no volume for",
               lambda job: replicas(job)["template"]["spec"]["volumes"].pop()),
        change("another claim", "has no claim", lambda job: replicas(job)["template"]["spec"]["volumes"][0]
               ["persistentVolumeClaim"].update(claimName="other")),
        change("limits without requests", "requests are not limits",
               lambda job: container(job)["resources"].pop("requests")),
        change("more workers than ranks", "--ranks is not", lambda job: replicas(job).update(replicas=3)),
        change("fewer cores than threads", "--threads is not", fewer_cores),
    ]


def main():
    job, claim = (yaml.load((FOLDER / name).read_text(), Loader) for name in ["mpijob.yaml", "volume-claim.yaml"])
    if sys.argv[1:] == ["--launcher-command"]:
        print(job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0], end="")
        return
    check(job, claim)
    cases = broken(job)
    for what, message, changed in cases:
        try:
            check(changed, claim)
        except Wrong as error:
            require(message in str(error), f"{what}: refused for another reason: {error}")
        else:
            raise Wrong(f"{what}: not refused")
    try:
        yaml.load("a: 1\na: 2\n", Loader)
    except yaml.constructor.ConstructorError:
        pass
    else:
        raise Wrong("a duplicate key: not refused")
    print(f"mpijob.yaml and volume-claim.yaml are valid; {len(cases) + 1} broken variants are refused")


try:
    main()
except (Wrong, yaml.YAMLError) as error:
    sys.exit(f"error: {error}")
