#!/bin/bash
# On the training machine, from the repository root: token streams and kernel checks. WORK: a folder that stays there.
set -o pipefail
WORK=${WORK:-/tmp/pocket}; OUT=${OUT:-$WORK/out}; mkdir -p "$WORK" "$OUT"
export PYTHONUNBUFFERED=1
if compgen -G ".whl/*.whl" > /dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || exit
  export PYTHONPATH=/tmp/site
fi
cd pocket || exit
python3 tokenize_text.py --corpus data/train.jsonl.xz --held data/held.jsonl.xz --tokenizer data/tokenizer.json \
  --out "$WORK" --processes "$(($(nproc) - 2))" > "$OUT/tokenize.log" 2>&1 &
timeout "${CHECK_S:-240}" python3 check_gpu.py --out "$WORK/check.json" 2>&1 | tee "$OUT/check.log"
wait; tail -n 12 "$OUT/tokenize.log"; cp "$WORK"/{sizes,installed}.json "$OUT"
