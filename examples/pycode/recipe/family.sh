#!/usr/bin/env bash
# From a trained target to the whole family: text of the target's own, draft, heads, trees, figures.
#
#     cd examples/pycode && bash recipe/family.sh W
#
# W holds the corpus (recipe.corpus), the trained target (W/target) and a draft to start from (W/draft_along, or
# W/wired_draft, which is made of it). Results go to W/out. Steps that are done are not done again; paceline and python
# must be on PATH. The EAGLE head takes the longest and learns on a core of its own, beside all else. On a CPU with
# instructions for bfloat16 set PRECISION=bf16.
set -euo pipefail

W=$(realpath "$1")
PRECISION=${PRECISION:-f32}
TEXTS=${TEXTS:-3072}          # of 256 tokens that the target writes
TOKENS=${TOKENS:-2000000}     # that the EAGLE head learns from, repeats counted
MINUTES=${MINUTES:-30}        # for the draft
FAST=(); [ "$PRECISION" = bf16 ] && FAST=(--bf16)
OUT=$W/out

once() {  # once FILE COMMAND...: until the file is there
    local made=$1; shift
    [ -e "$made" ] || "$@"
}

export_of() { python -m recipe.export --work "$W" --tokenizer target --out "$OUT" --models "$1"; }

own_text() {
    OMP_NUM_THREADS=2 python eagle_recipe/own_text.py --target "$OUT/target" --data "$W/train.bin" --out "$W/unfinished.bin" \
        --texts "$TEXTS" --minutes 60
    mv "$W/unfinished.bin" "$W/own.bin"
}

eagle() {
    paceline train eagle --eagle-version 3 --target "$OUT/target" --data "$W/own.bin" --data "$W/corpus.bin" \
        --aux-layers 2 --aux-layers 5 --aux-layers 8 --draft-vocab-size 3072 --tokens "$TOKENS" --ttt-steps 4 \
        --batch-size 4 --feature-cache-gb 4 \
        --precision "$PRECISION" --work-dir "$W/eagle_work" --out "$OUT/eagle3"
}

wired_draft() {
    python -m recipe.wiring --work "$W" --model "$W/draft_along" --plan draft --out "$W/wired_draft" "${FAST[@]}"
}

draft() {
    python -m recipe.distil --work "$W" --target "$W/target" --start wired_draft --repeats 0.25 --minutes "$MINUTES" \
        --threads 1 --batch-tokens 2048 --own-text "$W/own.bin" --own-every 2 --draft-lr 2e-3 "${FAST[@]}"
    touch "$W/draft/done"
}

medusa() {
    paceline train medusa --target "$OUT/target" --data "$W/own.bin" --data "$W/corpus.bin" --tokens 393216 \
        --num-heads 4 --num-layers 2 --batch-size 4 --epochs 3 --learning-rate 0.0015 --precision "$PRECISION" \
        --work-dir "$W/medusa_work" \
        --out "$OUT/medusa"
}

trees() {
    python -m recipe.trees --states "$W"/medusa_work/states-*/measure --target "$OUT/target" --medusa "$OUT/medusa"
    cp "$OUT/medusa/tree-2.json" "$OUT/medusa/tree.json"
}

once "$OUT/target" export_of target
once "$W/own.bin" own_text
head -c 262160 "$W/train.bin" > "$W/corpus.bin"  # its header and 512 texts as they are
export OMP_NUM_THREADS=1
once "$OUT/eagle3/acceptance.json" eagle &
once "$W/wired_draft" wired_draft
once "$W/draft/done" draft
once "$OUT/draft" export_of draft
once "$OUT/medusa/accuracy.json" medusa
once "$OUT/medusa/tree.json" trees
wait $!
once "$W/result.json" python -m recipe.evaluate --work "$W" --target "$OUT/target" --draft "$OUT/draft" --out "$W/result.json"
python eagle_recipe/measure.py --target "$OUT/target" --head "$OUT/eagle3" --data "$W/held_out.bin" --texts 128
