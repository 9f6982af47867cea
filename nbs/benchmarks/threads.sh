#!/usr/bin/env bash
# The runs behind threads.ipynb: `threads.sh one|two OUT_DIR`, on one GPU or on two. Rows of 3,072 tokens, 16 a step in micro-batches of 4, a drafter of Qwen3-8B's width.
set -uo pipefail
cd "$(dirname "$0")/../.."
one='{"target":["cuda:0"],"drafter":["cuda:0"]}'
two='{"target":["cuda:0"],"drafter":["cuda:1"]}'
run() { name=$1 limit=$2; shift 2; timeout "$limit" python3 -m dflash_nb.scale --geometry qwen3_8b --out "$out/scale_$name.json" "$@" > "$out/$name.log" 2>&1 || echo "$name: exit code $?"; tail -c 1500 "$out/$name.log"; echo; }
out=${2:-data/results}
case ${1:-} in
one) run one_gpu_128 "${LIMIT:-420}" --layers 8 --anchors 128 --steps 200 --devices "$one" --alone
     run one_gpu_512 "${LIMIT:-300}" --layers 8 --anchors 512 --steps 30 --devices "$one" --alone ;;
two) run two_gpus_128 "${LIMIT:-420}" --layers 20 --anchors 128 --steps 200 --devices "$two" --alone
     run two_gpus_512 "${LIMIT:-300}" --layers 34 --anchors 512 --steps 30 --devices "$two" --alone ;;
*) echo "usage: threads.sh one|two [OUT_DIR]" >&2; exit 2 ;;
esac
