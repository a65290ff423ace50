#!/usr/bin/env bash
# Is the gain real, and what would distillation have given for the same wall clock? Three seeds of GRPO in two variants
# (LoRA of rank 16, all weights), a margin written down before any of them, a stronger teacher's answers on the budget of
# one seed, one report with one sentence. Resumable: what has ended well is not run again.
#
#   bash runs/reality_check.sh tune        the learning rates, on seed 100; choose, and set LORA_LR and FULL_LR below
#   bash runs/reality_check.sh             margin grpo teacher distil report, in this order (any of them by name)
#   TEACHER=FOLDER bash runs/reality_check.sh distil report      a teacher that stands already
#   PRICE=4 bash runs/reality_check.sh     the price of an hour of the machine, for the records
#   MODEL=runs/warm/checkpoint LORA_LR=2e-4 VARIANTS=lora SEEDS=0 OUT=runs/reality_135m bash runs/reality_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
for stage in "$@"; do   # all of them, before the first one starts
    case "$stage" in tune | margin | grpo | teacher | distil | report) ;;
        *) echo "no stage $stage; there is tune, margin, grpo, teacher, distil, report" >&2; exit 2 ;; esac
done

# Chosen on seed 100 before the margin was written (labbook runs tune-*): the highest sampled pass@1 over both families at
# which greedy does not fall
LORA_LR=${LORA_LR:-3e-4} FULL_LR=${FULL_LR:-3e-5}

MODEL=${MODEL:-data/tiny} OUT=${OUT:-runs/reality} LABBOOK=${LABBOOK:-labbook.md} DEVICE=${DEVICE:-auto}
SEEDS=${SEEDS:-0 1 2} VARIANTS=${VARIANTS:-lora full} STEPS=${STEPS:-120} JOBS=${JOBS:-2} THREADS=${THREADS:-1} GPUS=${GPUS:-}
TUNE_LORA=${TUNE_LORA:-1e-4 3e-4 1e-3 3e-3} TUNE_FULL=${TUNE_FULL:-1e-5 3e-5 1e-4} TUNE_SFT=${TUNE_SFT:-1e-4 3e-4 1e-3}
TEACHER=${TEACHER:-$OUT/teacher/checkpoint} PORT=${PORT:-8008} ATTEMPTS=${ATTEMPTS:-4}
PREFIX= PREDICT=${PREDICT:-heldout-same.pass@1 >= 0.5}   # written down before each GRPO run
. runs/study.sh
plain "$OUT" "$MODEL" "$LABBOOK" "$TEACHER" "$PREDICT" "$DEVICE" "${PRICE:-}" "$LORA_LR" "$FULL_LR"
whole_numbers STEPS JOBS THREADS PORT ATTEMPTS ${GPUS:+GPUS}
for x in SEEDS VARIANTS TUNE_LORA TUNE_FULL TUNE_SFT; do   # xargs without a line would start a run without a name
    case "${!x}" in *[!\ ]*) ;; *) echo "$x is blank" >&2; exit 2 ;; esac
done
case "$SEEDS" in *[!0-9\ ]*) echo "SEEDS='$SEEDS': whole numbers are expected" >&2; exit 2 ;; esac
for v in $VARIANTS; do
    case "$v" in lora | full) ;; *) echo "no variant $v; there is lora, full" >&2; exit 2 ;; esac
done
export OUT LABBOOK GPUS PREFIX OMP_NUM_THREADS=$THREADS
hold

# the same for every run: 240 problems, 60 + 60 held out, 32 answers an optimizer step (4 problems x 8); xargs reads
# these lines, and takes a quoted path with spaces as one word
SAME="--model \"$MODEL\" --limit 60 --eval-n 32 --device $DEVICE${PRICE:+ --price-per-hour $PRICE}"
GRPO="train_grpo.py $SAME --arm grpo --max-steps $STEPS --prompts-per-step 4 --num-generations 8 --eval-every 1000000"

flags() { if [ "$1" = lora ]; then echo "--lora-rank 16 --lr $2"; else echo "--lr $2"; fi; }

tune() {
    for v in $VARIANTS; do
        rates=$TUNE_FULL; [ "$v" = lora ] && rates=$TUNE_LORA
        for lr in $rates; do echo "tune-$v-$lr $GRPO --seed 100 $(flags "$v" "$lr")"; done
    done | all
}

margin() {   # one rule a family, older than the first result
    local rule="success if gain >= 0.1 and gain > max(spread, 2*se); weak if gain > max(spread, 2*se); useless otherwise"
    for family in heldout-same heldout-different; do
        if grep -qsF "$family: $rule" "$LABBOOK"; then echo "$family: the margin stands in $LABBOOK"
        else python report.py --labbook "$LABBOOK" --register-margin "$family: $rule"; fi
    done
}

grpo() {
    for s in $SEEDS; do for v in $VARIANTS; do
        lr=$FULL_LR; [ "$v" = lora ] && lr=$LORA_LR
        echo "$v-s$s $GRPO --seed $s $(flags "$v" "$lr") --predict \"$PREDICT\""
    done; done | all
}

teacher() {   # three times the size of data/tiny, on the text of right solutions that data/tiny began with
    [ "$TEACHER" = "$OUT/teacher/checkpoint" ] || return 0   # one that was trained elsewhere
    [ -e data/tiny/work/pretrain.jsonl ] || [ -e "$OUT/teacher/final.json" ] || python data/tiny/prepare.py
    once teacher pretrain.py --hidden 256 --layers 8 --heads 8 --kv-heads 2 --ffn 704 --batch-tokens 16384 \
        --max-steps 1200 --lr 2e-3 --device "$DEVICE"
}

server=
stop_server() { [ -z "$server" ] || kill "$server" 2> /dev/null || true; server=; }
trap stop_server EXIT

listens() { (exec 3<> "/dev/tcp/127.0.0.1/$PORT") 2> /dev/null; }

serve() {   # returns when the teacher answers: its start is not on the budget
    if listens; then echo "port $PORT is in use, by another teacher maybe: set PORT" >&2; return 1; fi
    python data/distil/serve.py --model "$TEACHER" --port "$PORT" --device "$DEVICE" > "$OUT/serve.log" 2>&1 9>&- &
    server=$!
    until listens; do
        kill -0 "$server" 2> /dev/null || { tail -n 1 "$OUT/serve.log" >&2; return 1; }
        sleep 1
    done
}

distil() {   # the teacher's answers may take 0.7 of what one seed took, which leaves time for the training on them
    local first=${VARIANTS%% *} budget seed=${SEEDS%% *}
    if ! grep -qs '"status": "ok"' "$OUT/$first-s$seed/final.json"; then
        echo "no time of $OUT/$first-s$seed yet: the stage grpo first" >&2; exit 2
    fi
    budget=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["budget"]["wall_s"] * 0.7)' \
        "$OUT/$first-s$seed/final.json")
    # an asking that was cut short has written its rows too, and goes on
    if ! grep -qsE '"ended": "(all asked|budget)"' "$OUT/distil/prepared.json"; then
        serve
        python data/distil/prepare.py --base-url "http://127.0.0.1:$PORT/v1" --teacher-model "$TEACHER" \
            --attempts "$ATTEMPTS" --budget-seconds "$budget" --max-tokens 256 --output-dir "$OUT/distil" \
            --labbook "$LABBOOK"
        stop_server
    fi
    # SFT's learning rate by the validation loss, on seed 100, without an evaluation
    local sft="train_sft.py $SAME --data \"$OUT/distil/train.jsonl\" --valid \"$OUT/distil/valid.jsonl\" --valid-every 5"
    sft="$sft --epochs 3 --rows-per-step 8"
    for v in $VARIANTS; do
        for lr in $TUNE_SFT; do echo "tune-sft-$v-$lr ${sft/--eval-n 32/--eval-n 0} --seed 100 $(flags "$v" "$lr")"; done
    done | all
    for v in $VARIANTS; do
        lr=$(for lr in $TUNE_SFT; do
            echo "$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["losses"]["valid"])' \
                "$OUT/tune-sft-$v-$lr/final.json") $lr"
        done | sort -g | head -n 1 | cut -d " " -f 2)
        echo "sft-$v $sft $(flags "$v" "$lr")"
    done | all
}

report() {   # a run that failed or was killed has a config.json too, and stays a row
    local runs=() f
    for f in "$OUT"/*/config.json; do
        case "$f" in "$OUT"/tune-* | "$OUT"/teacher/* | *"*"*) ;; *) runs+=("$(dirname "$f")") ;; esac
    done
    [ ${#runs[@]} -gt 0 ] || { echo "no run in $OUT yet" >&2; exit 2; }
    python report.py --labbook "$LABBOOK" --output-dir "$OUT/report" --runs "${runs[@]}"
}

for stage in ${*:-margin grpo teacher distil report}; do
    "$stage"
done
