#!/bin/sh
# The main job, with the commands that a user has. `marft-bridge serve -- sh demo.sh` keeps the server up meanwhile.
set -eu
run=${RUN:-runs/math_duo}
bridge="${BRIDGE:-marft-bridge}"
config=examples/math_duo/bridge.toml

"$bridge" collect --config "$config" --run "$run"
"$bridge" train --config "$config" --run "$run"
"$bridge" compare --config "$config" --run "$run"
