#!/usr/bin/env bash
# SmolLM2-135M-Instruct on GSM8K: a supervised warm start on the training solutions, then GRPO, each evaluated on 100
# test problems x 32 samples before and after. Resumable: what has ended well is not run again, what has a checkpoint
# goes on.
#   python data/smollm2/prepare.py && python data/gsm8k/prepare.py && bash runs/gsm8k_smollm2.sh
# The settings for one large GPU are the defaults; STEPS, SEED, LABBOOK and DEVICE change them.
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=${STEPS:-60} SEED=${SEED:-0} LABBOOK=${LABBOOK:-labbook.md} DEVICE=${DEVICE:-auto}
SFT=runs/smollm2-gsm8k-sft-s$SEED GRPO=runs/smollm2-gsm8k-grpo-s$SEED
SAME="--task gsm8k --seed $SEED --limit 100 --eval-n 32 --max-new 256 --slots 512 --micro-batch-tokens 65536
      --labbook $LABBOOK --device $DEVICE --save-every 25"

once() {   # folder, command ...: run it, or go on with it, or skip it when it is done
    local folder=$1; shift
    if [ -f "$folder/final.json" ] && grep -q '"status": "ok"' "$folder/final.json"; then echo "$folder: done"
    elif [ -e "$folder/checkpoint" ]; then python "$1" --resume "$folder" --labbook "$LABBOOK"
    else rm -rf "$folder"; python "$@" --output-dir "$folder"; fi
}
once "$SFT" train_sft.py --model data/smollm2 --data data/gsm8k/sft.jsonl --valid data/gsm8k/sft-valid.jsonl \
    --epochs 2 --rows-per-step 32 --lr 5e-5 --warmup 20 $SAME
once "$GRPO" train_grpo.py --model "$SFT/checkpoint" --lr 5e-6 --max-steps "$STEPS" $SAME
