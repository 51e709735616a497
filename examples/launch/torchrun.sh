#!/usr/bin/env bash
# Trains on all GPUs of this host, one process each, bound to its share of the cores:
#
#     examples/launch/torchrun.sh RECIPE [key=value ...]
#
# On several hosts: the same command on each, with NODES=2 and HEAD=address-of-the-first (port 29400 must be open).
#
#     PROCESSES   on this host; by default as many as it has GPUs, or 1
#     RESTARTS    how often torchrun starts all processes again when one is lost; they go on from the newest checkpoint
#     GRACE       seconds for a last save after a signal
#
# Ends with 0 done, 75 "restart me: the same command goes on", 76 "do not restart me", 2 bad usage, 1 failed.
set -uo pipefail

if (($# == 0)); then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || true
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}
cores=$(nproc) # only those that this job may use
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE:-120}
SUREFOOT_CODES=$(mktemp -d)
export SUREFOOT_CODES
trap 'rm -rf "$SUREFOOT_CODES"' EXIT

meeting=(--standalone)
if ((${NODES:-1} > 1)); then
    : "${HEAD:?several hosts need HEAD, the address of the first one}"
    meeting=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${ID:-surefoot}")
fi

python=${PYTHON:-python}
"$python" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$processes" --max-restarts "${RESTARTS:-3}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$here/bound.py" train "$@" &
launcher=$!

# Whatever ends the job, torchrun is told once, and passes it on to its processes: they save, and end with 75.
asked=1 told=0
trap 'asked=1; ((told++)) || kill -TERM "$launcher" 2>/dev/null' TERM INT HUP USR1
while ((asked)); do # a signal interrupts the wait
    asked=0
    wait "$launcher"
    status=$?
done

if ((status == 0)); then
    exit 0
fi
# One that failed by itself makes the others end with 75, since they have lost it: what it said comes first.
said=" $(cat "$SUREFOOT_CODES"/* 2>/dev/null | tr '\n' ' ') "
for code in 76 2 1 75; do
    [[ $said == *" $code "* ]] && exit "$code"
done
exit "$status"
