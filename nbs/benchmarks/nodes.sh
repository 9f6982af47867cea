#!/usr/bin/env bash
# The runs behind nodes.ipynb: `nodes.sh cpu|gpus OUT_DIR`: one process, then several, on the same devices and the same global batch.
set -uo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_CPP_LOG_LEVEL=ERROR
out=${2:-data/results}
python=${PYTHON:-python3}
run() { name=$1 n=$2; shift 2; timeout "${LIMIT:-300}" "$python" -m torch.distributed.run --nproc-per-node "$n" --master-port 29713 -m dflash_nb.nodes "$@" --out "$out/nodes_$name.json" > /dev/null || echo "$name: exit code $?"; }
case ${1:-} in
cpu) c='{"row_len":256,"token_budget":2048,"micro_rows":1,"block_size":8,"num_draft_layers":2}'
     for n in 1 2 4; do run "cpu_$n" $n --geometry nano --layers 6 --anchors 32 --steps 15 --config "$c" --devices cpu --sums 1e5,1e6,4e6; done ;;
gpus) c='{"row_len":1024,"token_budget":32768,"micro_rows":4,"block_size":16}'
     a="--geometry qwen3_4b --layers 8 --anchors 128 --steps 20"
     run two_drafters 1 $a --config "$c" --devices '{"target":["cuda:0","cuda:1"],"drafter":["cuda:0","cuda:1"]}'
     run two_processes 2 $a --config "$c" --devices '{"target":["cuda:0"],"drafter":["cuda:0"]}' --sums 1e6,1e7,1e8,5e8 ;;
*) echo "usage: nodes.sh cpu|gpus [OUT_DIR]" >&2; exit 2 ;;
esac
