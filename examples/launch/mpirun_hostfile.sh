#!/usr/bin/env bash
# Starts train_gpt with Open MPI on the nodes of a host file:
#
#   examples/launch/mpirun_hostfile.sh hosts.txt examples/configs/mxfp8_both.yaml [key=value ...]
#
# hosts.txt has one line per node; slots is the number of ranks there:
#
#   node1 slots=4
#   node2 slots=4
#
# On GPUs, slots is the number of GPUs, and parallel.device=cuda a key=value.
#
# What every node needs: the same checkout, build and data at the same path (a shared file system, or copies), the
# same Open MPI, and ssh without a password from the node that runs this script. Ranks compare their configuration and
# the digest of their data before they train.
set -euo pipefail

if [[ $# -lt 2 || $1 == --help || $1 == -h ]]; then
  sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
  exit 2
fi
hosts=$1
config=$2
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Threads of one rank: cores of a node divided by its ranks. The BLAS reads these before the program starts.
threads=${THREADS_PER_RANK:-1}

launch=(mpirun --hostfile "$hosts")
# Each rank uses several cores, so none is bound to one.
launch+=(--bind-to none)
# mpirun passes variables to other nodes only when they are named.
launch+=(-x "OMP_NUM_THREADS=$threads" -x "OPENBLAS_NUM_THREADS=$threads" -x "MKL_NUM_THREADS=$threads")
# With several networks, say which one carries the messages: --mca btl_tcp_if_include eth1
if [[ -n ${NETWORK:-} ]]; then
  launch+=(--mca btl_tcp_if_include "$NETWORK" --mca oob_tcp_if_include "$NETWORK")
fi
if [[ $EUID -eq 0 ]]; then launch+=(--allow-run-as-root); fi

cd "$root"
exec "${launch[@]}" build/bin/train_gpt --config "$config" "train.threads=$threads" "$@"
