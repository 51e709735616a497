#!/usr/bin/env bash
# Trains on all GPUs of this host, one process per GPU, each pinned to its share of the cores:
#
#     examples/launch/torchrun.sh RECIPE [key=value ...]
#
# On several hosts: the same command on each, with NODES=2 and HEAD=address-of-the-first (port 29400 must be open).
#
#     PROCESSES   processes on this host; by default one per GPU, or 1
#     RESTARTS    how often torchrun restarts all processes when one is lost; they resume from the newest checkpoint
#     GRACE       seconds for a last checkpoint after a signal
#
# Exit codes: 0 done; 75 restart me, the same command resumes; 76 do not restart me; 2 bad usage; 1 failed.
set -uo pipefail

if (($# == 0)); then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || true
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}
cores=$(nproc) # only the cores this job may use
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${GRACE:-120}
SUREFOOT_CODES=$(mktemp -d)
export SUREFOOT_CODES
trap 'rm -rf "$SUREFOOT_CODES"' EXIT

rendezvous=(--standalone)
if ((${NODES:-1} > 1)); then
    : "${HEAD:?several hosts need HEAD, the address of the first one}"
    rendezvous=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${ID:-surefoot}")
fi

python=${PYTHON:-python}
"$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$processes" --max-restarts "${RESTARTS:-3}" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$here/bound.py" train "$@" &
launcher=$!

# Any signal is sent to torchrun once, as SIGTERM, which forwards it to its processes: they save, and exit with 75.
signalled=1 forwarded=0
trap 'signalled=1; ((forwarded++)) || kill -TERM "$launcher" 2>/dev/null' TERM INT HUP USR1
while ((signalled)); do # a signal interrupts the wait
    signalled=0
    wait "$launcher"
    status=$?
done

if ((status == 0)); then
    exit 0
fi
# A rank that fails makes the others exit with 75, because they lost it: its own code takes precedence.
codes=" $(cat "$SUREFOOT_CODES"/* 2>/dev/null | tr '\n' ' ') "
for code in 76 2 1 75; do
    [[ $codes == *" $code "* ]] && exit "$code"
done
exit "$status"
