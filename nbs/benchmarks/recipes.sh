#!/usr/bin/env bash
# Training recipes for a real model on one GPU: `recipes.sh PROMPTS OUT_DIR [PART ...]`. PROMPTS holds NAME.jsonl of every set that RecipeStudy names; every part goes on where it was stopped.
# TARGET: smollm2 (default), a folder, a Hugging Face id or a .gguf file. SETTINGS: JSON of RecipeStudy's fields that differ, or nano for a rehearsal in a minute on a CPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 2 ] || { echo "usage: recipes.sh PROMPTS OUT_DIR [PART ...]" >&2; exit 2; }
prompts=$1 out=$2; shift 2
[ $# -gt 0 ] || set -- prepare baseline search winner ceiling frontier decode compare
exec "${PYTHON:-python3}" -m dflash_nb.recipes "$@" --target "${TARGET:-smollm2}" --prompts "$prompts" --out "$out" ${SETTINGS:+--settings "$SETTINGS"}
