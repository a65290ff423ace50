#!/usr/bin/env bash
# The README's table of speed and memory on one GPU: one labbook record a line below. Parts, so that each fits ten
# minutes (about 5, 5 and 4 on an H200 with every rival installed, a third of that without):
#   bash runs/bench_gpu.sh [rollout-135m | rollout-1.5b | train | all]
# Rivals that are not installed are said in the table. AGAINST="" leaves the rivals out; SMOL is the folder of
# SmolLM2-135M-Instruct (python data/smollm2/prepare.py), REPEATS and LABBOOK as in bench.py.
set -uo pipefail   # no -e: one bench that fails has written its record, and the next one runs
cd "$(dirname "$0")/.."
PART=${1:-all} LABBOOK=${LABBOOK:-labbook.md} REPEATS=${REPEATS:-3} SMOL=${SMOL:-data/smollm2}
AGAINST=${AGAINST-hf vllm trl}
failed=0

against() {   # the rivals of AGAINST that this bench knows
    local known=" $* " found=
    for rival in $AGAINST; do case "$known" in *" $rival "*) found="$found $rival" ;; esac; done
    echo "--against$found"
}
bench() {
    local rounds="--repeats $REPEATS"
    [ "$1" != memory ] || rounds=   # a peak is no median
    echo; echo "== bench.py $*"; python bench.py "$@" $rounds --labbook "$LABBOOK" || failed=1
}
part() { [ "$PART" = all ] || [ "$PART" = "$1" ]; }

case "$PART" in all | rollout-135m | rollout-1.5b | train) ;; *) echo "no part $PART" >&2; exit 2 ;; esac
# tokens a second, start-up, skewed lengths: 135M and 1.5B, random weights
part rollout-135m && bench rollout --shape 135m --rows 64 256 512 $(against hf vllm)
part rollout-1.5b && bench rollout --shape 1.5b --rows 64 256 $(against hf vllm)
if part train; then
    # a whole GRPO step and the learning step, on real weights against TRL; the learning step at 1.5B
    if [ -f "$SMOL/model.safetensors" ]; then bench train --shape "$SMOL" $(against trl)
    else echo "$SMOL holds no model: random weights, without TRL"; bench train --shape 135m --against; fi
    bench train --shape 1.5b --against
    # three ways to cut a batch at 135M; full-parameter GRPO of a 1.5B model, for speed and for memory
    bench memory --shape 135m
fi
exit $failed
