#!/bin/sh
# From a hosted desk to local nodes: every step is a command that a user has. From the root of the checkout:
#
#     sh examples/hosted_to_local/run.sh
#
# Without a provider, a model that this project made answers as `hosted-large`. With one:
#
#     HOSTED_BASE_URL=https://api.openai.com/v1 HOSTED_MODEL=... HOSTED_API_KEY=... sh examples/hosted_to_local/run.sh
#
# RUNS: hosted runs that are recorded. ROUNDS: of reinforcement. ALONE=1: also each node moved alone. RUN and CONFIG go
# together, as train.traces names the run folder: RUN=runs/lookup_hosted CONFIG=examples/hosted_to_local/lookup_hosted.toml
# leaves one node hosted, and answers its calls from the record.
set -eu
here=examples/hosted_to_local
config=${CONFIG:-$here/bridge.toml}
run=${RUN:-runs/hosted_to_local}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
bridge="$python -m marft_bridge"

if [ -z "${HOSTED_BASE_URL:-}" ]; then
    teacher=${TEACHER:-runs/teacher}
    [ -d "$teacher/model" ] || $python -m examples.hosted_to_local.teacher "$teacher"
    exec $python -m examples.hosted_to_local.hosted_server "$teacher/model" -- sh "$0"
fi
if [ -z "${SERVED:-}" ]; then
    # 1. traces of the hosted app; 2. which nodes to move?
    $python -m examples.hosted_to_local.record "$run/hosted.duckdb" --config "$config" --runs "${RUNS:-240}"
    $bridge plan "$run/hosted.duckdb" --metric reward --prices "$here/prices.toml" \
        --model "${MODEL:-smollm2-135m}" --calls "${CALLS:-48}" --json > "$run/plan.json"
    $python -m examples.hosted_to_local.picture "$run/plan.json" "$run/plan.svg"
    $bridge traces export "$run/traces" --store "$run/hosted.duckdb"
    SERVED=1 exec $bridge serve --config "$config" --run "$run" -- sh "$0"
fi
# 3. imitate, 4. what that alone is worth; which node is worth what, and was the plan right?
$bridge train --config "$config" --run "$run" --rounds 0
$python -m examples.hosted_to_local.looks imitated --config "$config" --run "$run"
if [ -n "${ALONE:-}" ]; then
    $python -m examples.hosted_to_local.looks alone --config "$config" --run "$run"
fi
$bridge plan "$run/hosted.duckdb" --calibration "$run"
# 5. reinforce
$bridge train --config "$config" --run "$run" --resume --rounds "${ROUNDS:-3}"
# 6. hosted against mixed against local, 7. the verdict
$bridge compare --config "$config" --run "$run" --non-inferior 0.03
$bridge promote --config "$config" --run "$run" --efficient --by "${BY:-the example}" --yes
