#!/usr/bin/env bash
# Ray 2.60.0 and the resource `neuron_cores`: four things that a plan of NeuronCores has to know.
#
#   1. An actor that asks for no core gets no NEURON_RT_VISIBLE_CORES at all, and the Neuron runtime then takes every
#      core. With RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 Ray sets it to nothing instead.
#   2. NEURON_RT_VISIBLE_CORES in an actor's runtime_env wins over the cores that Ray assigned, without a word: two
#      actors, each with two cores reserved, both see 4 and 5.
#   3. Their order is that of a Python set of strings: "4,5" in one process, "5,4" in another, by its hash seed.
#      Written as a range ("4-5") it stays as it is.
#   4. An actor started after another has ended gets the lowest free cores: a model that is started anew does not come
#      back to the cores it had.
#
# Seen on 2026-11-27; no device is needed, since the resource is declared. Exits 1 when one of them changes. For
# Paceline: it sets the variable itself in every process, as a range, in each that uses no core too, and holds a lock
# for each core (docs/placement.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ray==2.60.0 2>/dev/null
cat >"$folder/cores.py" <<'PYTHON'
import os
import time

import ray


@ray.remote(num_cpus=0)
class Actor:
    def cores(self):
        return os.environ.get("NEURON_RT_VISIBLE_CORES")


def start(cores=0, visible=None, seed="0"):
    environment = {"PYTHONHASHSEED": seed, **({"NEURON_RT_VISIBLE_CORES": visible} if visible else {})}
    resources = {"neuron_cores": cores} if cores else None
    actor = Actor.options(resources=resources, runtime_env={"env_vars": environment}).remote()
    return actor, ray.get(actor.cores.remote())


def end(actor):
    before = ray.available_resources().get("neuron_cores", 0)
    ray.kill(actor)
    while ray.available_resources().get("neuron_cores", 0) == before:  # given back a moment later
        time.sleep(0.1)


ray.init(num_cpus=2, resources={"neuron_cores": 8}, include_dashboard=False, log_to_driver=False)
_, none = start()
print("no core asked for:", none)

actors, seen = zip(*(start(2, "4,5", str(seed)) for seed in range(4)))
print("two cores reserved by each of four, and 4,5 given to all:", seen)
assert len(set(seen)) == 2 and all(sorted(cores) == sorted("4,5") for cores in seen)
end(actors[0])
_, ranged = start(2, "4-5")
print("given as a range:", ranged)
assert ranged == "4-5"

end(actors[1])
end(actors[2])
low, of_low = start(2)
high, of_high = start(2)
end(low)
end(high)
_, again = start(2)
print("had", of_high, "and comes back with", again)
assert set(again.split(",")) == set(of_low.split(",")) != set(of_high.split(","))
expected = os.environ.get("EXPECT_NONE")
assert none == expected, none
PYTHON
"$folder/venv/bin/python" "$folder/cores.py"
RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1 EXPECT_NONE="" "$folder/venv/bin/python" "$folder/cores.py"
