#!/usr/bin/env bash
# Six ways to train on one frozen pool, with their controls: every run has the same problems, rollouts, steps and
# evaluation. Resumable: a run that has ended well is skipped, one with a checkpoint goes on, any other starts anew.
#
#   bash runs/six_arms.sh 0 1 2                                  seeds (default 0 1 2); runs/six_arms/ gets all of it
#   JOBS=1 STEPS=20 OUT=runs/six_arms_try bash runs/six_arms.sh 100
#   MODEL=runs/smollm2-gsm8k-sft-s0/checkpoint TASK=gsm8k OUT=runs/six_gsm8k JOBS=6 STEPS=50 GRPO_LR=5e-6 RFT_LR=5e-6 \
#       OPD_LR=5e-6 MORE="--slots 512 --micro-batch-tokens 65536" SCREEN="--limit 7473 --slots 512" \
#       EVAL="--eval-other math500 --limit-other 133" bash runs/six_arms.sh 0
#
# LIMIT: problems of each evaluation; PRICE: of an hour of the machine, for the records.
#
# One line a run is below; then: python report.py --runs runs/six_arms runs/six_arms/untrained-again.json
set -euo pipefail
cd "$(dirname "$0")/.."
for s in "$@"; do
    case "$s" in *[!0-9\ ]*) ;; *[0-9]*) continue ;; esac
    echo "seed '$s' is not a whole number; the arguments are seeds" >&2; exit 2
done

# The learning rate of each family, chosen on seed 100 before the study, among 1e-5, 3e-5 and 1e-4 (100 steps, this pool,
# labbook runs rft-*, opd-*, grpo-*): the highest sampled pass@1 at which greedy does not fall. At 1e-4 GRPO and RFT lose
# .07 to .11 of greedy; OPD's three rates are within .004 of each other, and it has the rate of the others.
GRPO_LR=${GRPO_LR:-3e-5} RFT_LR=${RFT_LR:-3e-5} OPD_LR=${OPD_LR:-3e-5}

MODEL=${MODEL:-data/tiny} TASK=${TASK:-arithmetic} OUT=${OUT:-runs/six_arms} LABBOOK=${LABBOOK:-labbook.md}
STEPS=${STEPS:-100} EVERY=${EVERY:-25} N=${N:-32} N_OTHER=${N_OTHER:-16} MAX_NEW=${MAX_NEW:-256}
JOBS=${JOBS:-2} THREADS=${THREADS:-1} DEVICE=${DEVICE:-auto} GPUS=${GPUS:-} PREFIX=$(basename "$OUT")-
CANDIDATES=${CANDIDATES:-2000} SCREEN=${SCREEN:---limit $CANDIDATES} LIMIT=${LIMIT:-100} EVAL=${EVAL:-} MORE=${MORE:-}
. runs/study.sh
plain "$OUT" "$MODEL" "$LABBOOK" "$TASK" "$DEVICE" "${PRICE:-}" "$EVAL" "$MORE" "$GRPO_LR" "$RFT_LR" "$OPD_LR"
whole_numbers STEPS EVERY N N_OTHER MAX_NEW LIMIT JOBS THREADS ${GPUS:+GPUS}
export OUT LABBOOK GPUS PREFIX OMP_NUM_THREADS=$THREADS
hold

# problems: for the generated task more than its files of first use hold (they begin with the same ones)
TASKS=()
if [ "$TASK" = arithmetic ]; then
    TASKS=(--tasks-dir "$OUT/tasks")
    [ -e "$OUT/tasks/heldout-wording.jsonl" ] ||
        python data/arithmetic/prepare.py --train "$CANDIDATES" --heldout 100 --output-dir "$OUT/tasks"
fi

# the pool, and its base rate again with fresh samples
POOL=$OUT/pool.jsonl
SAME=(--model "$MODEL" --task "$TASK" ${TASKS[@]+"${TASKS[@]}"} --max-new "$MAX_NEW" --device "$DEVICE")
[ -e "$POOL.meta.json" ] || python eval_passk.py "${SAME[@]}" --split train --keep 1 7 --n 8 $SCREEN \
    --pool-out "$POOL" --labbook "$LABBOOK"
[ -e "$OUT/pool-again.json" ] || python eval_passk.py "${SAME[@]}" --tasks "$POOL" --limit 1000000 --n 8 --k 1 --seed 1 \
    --out "$OUT/pool-again.json" --label "pool, fresh samples" --labbook "$LABBOOK"
# the untrained model with another seed: the evaluation's own noise
[ -e "$OUT/untrained-again.json" ] || python eval_passk.py "${SAME[@]}" --n "$N" --limit "$LIMIT" --seed 1 \
    --out "$OUT/untrained-again.json" --label untrained --labbook "$LABBOOK"

SAME+=(--pool "$POOL" --max-steps "$STEPS" --prompts-per-step 8 --num-generations 8 --eval-every "$EVERY" --eval-n "$N"
       --eval-n-other "$N_OTHER" --eval-kl --save-every "$EVERY" --limit "$LIMIT" ${PRICE:+--price-per-hour "$PRICE"} $EVAL $MORE)


for seed in "${@:-0 1 2}"; do for s in $seed; do
    S="--seed $s$(printf ' "%s"' "${SAME[@]}")"   # quoted, for xargs: a path may hold spaces
    echo "grpo-s$s            train_grpo.py --arm grpo --lr $GRPO_LR $S"
    echo "penalty0.2-s$s      train_grpo.py --arm grpo_length_penalty --lam 0.2 --lr $GRPO_LR $S"
    echo "penalty0.5-s$s      train_grpo.py --arm grpo_length_penalty --lam 0.5 --lr $GRPO_LR $S"
    echo "rft-s$s             train_rft.py --arm rft_shortest --lr $RFT_LR $S"
    echo "braked-s$s          train_rft.py --arm rft_shortest_braked --lr $RFT_LR $S"
    echo "rft_random-s$s      train_rft.py --arm rft_random --lr $RFT_LR $S"
    echo "opd-s$s             train_opd.py --arm opd --lr $OPD_LR $S"
    echo "dr_grpo-s$s         train_grpo.py --arm dr_grpo --lr $GRPO_LR $S"
    echo "random_reward-s$s   train_grpo.py --arm random_reward --lr $GRPO_LR $S"
    echo "permuted_reward-s$s train_grpo.py --arm permuted_reward --lr $GRPO_LR $S"
    echo "format_only-s$s     train_grpo.py --arm format_only --lr $GRPO_LR $S"
    echo "lr0-s$s             train_grpo.py --arm grpo --lr 0 $S"
done; done | all
echo "all runs are in $OUT: python report.py --runs $OUT $OUT/untrained-again.json"
