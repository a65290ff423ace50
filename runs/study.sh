# What runs/six_arms.sh and runs/reality_check.sh share, sourced by both: settings are checked, a folder has one start at
# a time, and a run that has ended well is skipped, one with a checkpoint goes on, any other starts anew.
# They set OUT, LABBOOK, GPUS and PREFIX (of the run folders' names).

plain() {   # values: each is a word of a line that xargs reads
    local x
    for x in "$@"; do
        case "$x" in *[\"\'\\]* | *$'\n'*)
            echo "${x//$'\n'/ }: quotes, backslashes and line ends are not taken here" >&2; exit 2 ;; esac
    done
}

whole_numbers() {   # names of variables
    local x
    for x in "$@"; do
        case "${!x}" in "" | *[!0-9]* | 0*) echo "$x='${!x}' is not a whole number from 1" >&2; exit 2 ;; esac
    done
}

hold() {   # its runs hold it too: a second start would clear away the folders that they write to
    mkdir -p "$OUT"
    exec 9> "$OUT/.lock"
    if command -v flock > /dev/null && ! flock -n 9; then
        echo "OUT=$OUT is in use by another start, or by a run that it left behind: wait for its end" >&2; exit 2
    fi
}

once() {   # name, script, flags ...: an end that was reached with fewer steps goes on
    [ $# -gt 1 ] || return 0   # xargs without a line
    local folder=$OUT/$PREFIX$1 command; shift
    local words=" $* " steps=
    case "$words" in *" --max-steps "*) steps=${words#* --max-steps }; steps=${steps%% *} ;; esac
    if grep -qs '"status": "ok"' "$folder/final.json" &&
        grep -qsE "\"max_steps\": ${steps:-[0-9]+}([^0-9]|$)" "$folder/final.json"
    then echo "$folder: done"; return; fi
    if [ -e "$folder/checkpoint" ]; then command=("$1" --resume "$folder" ${steps:+--max-steps "$steps"})
    else rm -rf "$folder"; command=("$@" --output-dir "$folder"); fi
    # GPUS=2: the runs that go on side by side are dealt out to two GPUs
    [ -z "${GPUS:-}" ] || export CUDA_VISIBLE_DEVICES=$((SLOT % GPUS))
    echo "$folder: python ${command[0]} ..."
    python "${command[@]}" --labbook "$LABBOOK" >> "$folder.log" 2>&1 || { tail -n 1 "$folder.log" >&2; return 1; }
    tail -n 1 "$folder.log"
}
export -f once

all() {   # lines "name script flags ...", JOBS at a time
    xargs -L 1 -P "$JOBS" ${GPUS:+--process-slot-var=SLOT} bash -c 'once "$@"' once
}
