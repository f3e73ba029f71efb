#!/usr/bin/env bash
# From a trained target to the whole family: draft, text of the target's own, heads, trees, figures.
#
#     cd examples/pycode && bash recipe/family.sh W
#
# W holds the corpus (recipe.corpus), the trained target (W/target) and a draft to start from (W/draft_along). Results go
# to W/out. Steps that are done are not done again; paceline and python must be on PATH. On a CPU with instructions for
# bfloat16 set PRECISION=bf16: with MINUTES=9, TEXTS=1024 and TOKENS=393216 it then takes half an hour on two cores.
set -euo pipefail

W=$(realpath "$1")
PRECISION=${PRECISION:-f32}
TEXTS=${TEXTS:-1536}       # of 256 tokens that the target writes
TOKENS=${TOKENS:-524288}   # that a head learns from
MINUTES=${MINUTES:-30}     # for the draft
FAST=(); [ "$PRECISION" = bf16 ] && FAST=(--bf16)
export OMP_NUM_THREADS=2

once() {  # once FILE COMMAND...: until the file is there
    local made=$1; shift
    [ -e "$made" ] || "$@"
}

draft() {
    OMP_NUM_THREADS=1 python -m recipe.distil --work "$W" --target "$W/target" --start wired_draft --repeats 0.25 \
        --minutes "$MINUTES" --workers 2 --threads 1 --batch-tokens 2048 --own-batches 3 --own-every 3 --draft-lr 2e-3 "${FAST[@]}"
    touch "$W/draft/done"
}

own_text() {
    python eagle_recipe/own_text.py --target "$W/out/target" --data "$W/train.bin" --out "$W/own.part" --texts "$TEXTS" \
        --minutes 60
    mv "$W/own.part" "$W/own.bin"
}

eagle() {
    OMP_NUM_THREADS=1 paceline train eagle --version 3 --target "$W/out/target" --data "$W/own.bin" --data "$W/corpus.bin" \
        --layers 2 --layers 5 --layers 8 --draft-vocabulary 3072 --tokens "$TOKENS" --passes 4 --rows 8 \
        --precision "$PRECISION" --work "$W/eagle_work" --out "$W/out/eagle3"
}

medusa() {
    OMP_NUM_THREADS=1 paceline train medusa --target "$W/out/target" --data "$W/own.bin" --data "$W/corpus.bin" \
        --tokens "$((TOKENS - 64 * 256))" --heads 4 --layers 2 --rows 4 --epochs 3 --rate 0.0015 \
        --precision "$PRECISION" --work "$W/medusa_work" --out "$W/out/medusa"
}

once "$W/wired_draft" python -m recipe.wiring --work "$W" --model "$W/draft_along" --plan draft --out "$W/wired_draft" "${FAST[@]}"
once "$W/draft/done" draft
once "$W/out/draft" python -m recipe.export --work "$W" --tokenizer target --out "$W/out"
once "$W/own.bin" own_text
head -c 262144 "$W/train.bin" > "$W/corpus.bin"
once "$W/out/eagle3/acceptance.json" eagle &
once "$W/out/medusa/accuracy.json" medusa
wait $!
python -m recipe.trees --states "$W"/medusa_work/states-*/measure --target "$W/out/target" --medusa "$W/out/medusa"
cp "$W/out/medusa/tree-2.json" "$W/out/medusa/tree.json"
once "$W/result.json" python -m recipe.evaluate --work "$W" --target "$W/out/target" --draft "$W/out/draft" --out "$W/result.json"
python eagle_recipe/measure.py --target "$W/out/target" --head "$W/out/eagle3" --data "$W/held_out.bin" --texts 128
