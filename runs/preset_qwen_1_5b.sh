#!/usr/bin/env bash
# One step of every arm at the size and with the settings of --preset qwen-1.5b, on random weights of that shape, on one
# large GPU. The answers are noise, so rewards are 0 and only opd and random_reward have a gradient.
#   bash runs/preset_qwen_1_5b.sh            OUT: a folder with 25 GB free; LABBOOK, DEVICE as elsewhere
#   bash runs/preset_qwen_1_5b.sh rft opd    these two alone
# Needs data/gsm8k and data/math500 (their prepare.py).
set -euo pipefail
cd "$(dirname "$0")/.."
ALL="grpo penalty0.2 penalty0.5 rft braked rft_random opd random_reward permuted_reward format_only dr_grpo"
ARMS=${*:-$ALL}
for arm in $ARMS; do
    case " $ALL " in *" $arm "*) ;; *) echo "no arm $arm; there is $ALL" >&2; exit 2 ;; esac
done
OUT=${OUT:-runs/preset_qwen_1_5b} LABBOOK=${LABBOOK:-labbook.md} DEVICE=${DEVICE:-auto}
mkdir -p "$OUT"
[ -e "$OUT/model/config.json" ] || python - "$OUT/model" <<'PY'
import sys
import torch
from bench import SHAPES
from common import load_tokenizer
from model import new_model, save_model
save_model(new_model(SHAPES["1.5b"], seed=0).to(torch.bfloat16), sys.argv[1], load_tokenizer("data/tiny"))
PY
once() {   # name, script, flags ...
    case " $ARMS " in *" $1 "*) ;; *) return 0 ;; esac
    local folder=$OUT/qwen-1.5b-$1; shift
    grep -qs '"status": "ok"' "$folder/final.json" && return
    rm -rf "$folder"
    python "$@" --preset qwen-1.5b --model "$OUT/model" --max-steps 1 --limit 2 --limit-other 2 --eval-n 8 \
        --eval-n-other 8 --device "$DEVICE" --output-dir "$folder" --labbook "$LABBOOK" > "$folder.log" 2>&1 ||
        { tail -n 1 "$folder.log" >&2; return 1; }
    tail -n 1 "$folder.log"
    rm -rf "$folder"/checkpoint*   # 18 GB, of noise
}
once grpo          train_grpo.py --arm grpo
once penalty0.2    train_grpo.py --arm grpo_length_penalty --lam 0.2
once penalty0.5    train_grpo.py --arm grpo_length_penalty --lam 0.5
once rft           train_rft.py  --arm rft_shortest
once braked        train_rft.py  --arm rft_shortest_braked
once rft_random    train_rft.py  --arm rft_random
once opd           train_opd.py  --arm opd
once random_reward train_grpo.py --arm random_reward
once permuted_reward train_grpo.py --arm permuted_reward
once format_only   train_grpo.py --arm format_only
once dr_grpo       train_grpo.py --arm dr_grpo
