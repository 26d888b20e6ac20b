#!/bin/sh
# A trained team into one node, from the root of the checkout: distil, train, compare, and the table of quality and cost.
#
#     sh examples/team_in_one/run.sh runs/math_duo
#
# The team is a run folder of examples/math_duo that was trained. RUN: where the node's run goes, a new one. A run that
# was stopped goes on with the commands themselves, `train` and `compare` with --resume.
set -eu
here=examples/team_in_one
run=${RUN:-runs/team_in_one}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
bridge="$python -m marft_bridge"

if [ -z "${SERVED:-}" ]; then
    team=${1:?name the run folder of a trained team, such as runs/math_duo}
    if [ -e "$run/adapters" ]; then  # a team was distilled: what an attempt leaves that failed before is no obstacle
        echo "$run is begun already: name another as RUN=..., or go on with train --resume and compare --resume" >&2
        exit 2
    fi
    $bridge distil "$team" --into solver --config $here/bridge.toml --run "$run"
    SERVED=1 exec $bridge serve --config $here/bridge.toml --run "$run" -- sh "$0"
fi
$bridge train --config $here/bridge.toml --run "$run"
$bridge compare --config $here/bridge.toml --run "$run"
$python -m examples.team_in_one.figures "$run"
