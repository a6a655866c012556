#!/usr/bin/env bash
# From a fresh clone to a trained agent on a CPU: makes .venv, installs requirements.txt, trains configs/quickstart.py.
#
#   bash launch/quickstart.sh [--seed N] [--workdir DIR] [--config.section.name=value ...]
#
# An interrupted run is resumed by the same command. With the default workdir, runs/quickstart, a finished run is moved to
# runs/quickstart-1, -2, ...; with --workdir nothing is moved. SAO_VENV names another environment, SAO_PYTHON another Python.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

arguments=()
workdir=""

# seed N: adds the argument; a wrong one is told before anything is installed.
seed() {
  case "$1" in
    "" | *[!0-9]* | ???????????*) sao_fail "--seed must be a whole number from 0 to 4294967295, got '$1'." ;;
  esac
  [ "$((10#$1))" -le 4294967295 ] || sao_fail "--seed must be a whole number from 0 to 4294967295, got '$1'."
  arguments+=("--config.seed=$((10#$1))")
}

while [ "$#" -gt 0 ]; do
  case "$1" in
    --help | -h) usage; exit 0 ;;
    --seed=*) seed "${1#*=}" ;;
    --workdir=*) workdir="${1#*=}" ;;
    --seed | --workdir)
      [ "$#" -ge 2 ] || sao_fail "$1 needs a value; see --help."
      if [ "$1" = --seed ]; then seed "$2"; else workdir="$2"; fi
      shift ;;
    --config.*=* | --debug) arguments+=("$1") ;;
    *) sao_fail "unknown argument $1; see --help." ;;
  esac
  shift
done
if [ -z "$workdir" ]; then
  workdir="$SAO_ROOT/runs/quickstart"
  arguments+=(--keep_previous)
fi

sao_environment base "-r requirements.txt"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec "$PYTHON" "$SAO_ROOT/launch/train.py" --config="$SAO_ROOT/configs/quickstart.py" --workdir="$workdir" ${arguments[@]+"${arguments[@]}"}
