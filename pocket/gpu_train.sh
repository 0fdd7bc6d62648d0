#!/bin/bash
# On the training machine, from the repository root: trains or goes on; arguments go to train.py. When the run is
# finished, copies the first parts of the weights to $OUT; `gpu_train.sh rest` copies the others.
set -o pipefail
WORK=${WORK:-/tmp/pocket}; OUT=${OUT:-$WORK/out}
export PYTHONUNBUFFERED=1 PYTHONPATH=/tmp/site PYTORCH_ALLOC_CONF=expandable_segments:True
if [ "$1" != rest ]; then
  GPUS=$(nvidia-smi -L | wc -l)
  DELTA=$(python3 -c "import json; print(json.load(open('$WORK/check.json'))['delta'])")
  LAUNCH="python3"; [ "$GPUS" -gt 1 ] && LAUNCH="torchrun --standalone --nproc-per-node $GPUS"
  (cd pocket && $LAUNCH train.py --data "$WORK" --out "$OUT" --delta "$DELTA" "$@") 2>&1 | tail -n 60
  cp "$OUT/log.jsonl" "$WORK/log.$(date +%s).jsonl"
fi
ls -l "$WORK"/weights 2>/dev/null || exit 0
cp "$WORK/weights/weights.json" "$OUT"
if [ "$1" = rest ]; then cp "$WORK"/weights/weights.0[4-7] "$OUT"; else cp "$WORK"/weights/weights.0[0-3] "$OUT"; fi
