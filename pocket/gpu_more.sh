#!/bin/bash
# On the training machine, from the repository root, in one call: trains the packaged model further and exports it.
# SECONDS_IN_ALL: of this call; the last RESERVE of them are for the export. Out, in $OUT: the file in parts, logs.
set -o pipefail
START=$(date +%s); WORK=${WORK:-/tmp/pocket}; OUT=${OUT:-$WORK/out}; mkdir -p "$WORK" "$OUT"
DEADLINE=$((START + ${SECONDS_IN_ALL:-590} - ${RESERVE:-65}))
export PYTHONUNBUFFERED=1 PYTHONPATH=/tmp/site:${TANDEM:-$PWD/src} PYTORCH_ALLOC_CONF=expandable_segments:True
if compgen -G ".whl/*.whl" > /dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
fi
cd pocket || exit
python3 tokenize_text.py --corpus "${CORPUS:-data/excerpt.jsonl.xz}" --held data/held.jsonl.xz --tokenizer data/tokenizer.json \
  --out "$WORK" --processes "${PROCESSES:-12}" ${TOKENIZE_ARGS---installed-bytes 4000000} > "$OUT/tokenize.log" 2>&1 &
python3 train.py --data "$WORK" --out "$WORK" --recipe more --init ../src/tandem/pocket/pocket.gguf --wait \
  --deadline $DEADLINE --minutes 20 --save-every-s 9999 "$@" 2>&1 | tee "$OUT/train.log" | tail -n 40
tail -n 12 "$OUT/tokenize.log"; cp "$WORK"/{log.jsonl,sizes.json,installed.json} "$OUT"
python3 export.py --weights "$WORK/weights" --tokenizer data/tokenizer.json --out "$WORK/pocket.gguf" ${EXPORT_ARGS-} &&
  split -n 2 -d "$WORK/pocket.gguf" "$OUT/pocket.gguf."
sha256sum "$WORK/pocket.gguf"; echo "exported after $(($(date +%s) - START)) s"
# The unrounded checkpoint on the same text, measured by Tandem, if the library runs here and time is left.
python3 export.py --f32 --weights "$WORK/weights" --tokenizer data/tokenizer.json --out "$WORK/pocket-f32.gguf" ${EXPORT_ARGS-} &&
  timeout $((START + ${SECONDS_IN_ALL:-590} - $(date +%s))) python3 evaluate.py "$WORK/pocket-f32.gguf" --held data/held.jsonl.xz \
    --out "$OUT/f32.json" --completions 0
echo "done after $(($(date +%s) - START)) s"
