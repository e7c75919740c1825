#!/usr/bin/env bash
# Installs ligerzoo into a virtual environment, one line per step. `make` calls it:
#
#   tools/install.sh VENV EXTRAS            # with the pinned versions; for example: tools/install.sh .venv test,dev
#   tools/install.sh VENV EXTRAS newest     # with the newest releases, beyond the bounds of pyproject.toml
#   tools/install.sh VENV EXTRAS oldest     # with the lowest versions of libraries that have an upper bound
#
# TORCH=pinned takes torch and triton from constraints.txt, and the newest of everything else. The newest also have the
# engines of tools/engines.txt.
#
# pip's output goes to a log, which is shown if a step fails. The file VENV.incomplete exists while an environment is
# being changed. If an earlier run failed or was killed and left this file, the environment is made again from nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1 extras=$2 versions=${3:-pinned}
python=${PYTHON:-python3}
log=$(mktemp) requirements=$(mktemp) constraints=$(mktemp)
trap 'rm -f "$log" "$requirements" "$constraints"' EXIT

megabytes() { if [ -d "$venv" ]; then du -sm "$venv" | cut -f1; else echo 0; fi; }

# step MESSAGE COMMAND...: runs the command and prints one line, with the seconds so far if the output is a terminal.
step() {
  local message=$1 before pid start=$SECONDS
  shift
  before=$(megabytes)
  "$@" >"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  printf '%s ... ' "$message"
  while [ -t 1 ] && kill -0 "$pid" 2>/dev/null; do
    printf '\r%s ... %d s ' "$message" $((SECONDS - start))
    sleep 1
  done
  if ! wait "$pid"; then
    printf 'failed\n\n'
    cat "$log"
    printf '\n%s failed. The messages above are from: %s\n' "$message" "$*"
    exit 1
  fi
  trap - INT TERM
  if [ -t 1 ]; then printf '\r%s ... ' "$message"; fi
  printf '%d MB, %d s\n' $(($(megabytes) - before)) $((SECONDS - start))
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "ligerzoo needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Try: make PYTHON=python3.12" >&2
  exit 1
}
clear=
if [ -e "$venv.incomplete" ]; then
  clear=--clear
elif [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
  echo "VENV=$venv is a directory with other files in it, not a virtual environment. Give another name." >&2
  exit 1
fi
touch "$venv.incomplete"
step "Creating $venv with $("$python" --version)" "$python" -m venv $clear "$venv"
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile)
if [ "$versions" = pinned ]; then
  pip+=(--constraint constraints.txt)
  step "Installing torch" "${pip[@]}" torch  # first, so that nothing else chooses its version
  step "Installing ligerzoo[$extras]" "${pip[@]}" --editable ".[$extras]"
else
  "$python" tools/requirements.py "$versions" "$extras" >"$requirements"
  if [ "${TORCH:-}" = pinned ]; then grep -E '^(torch|triton)==' constraints.txt >"$constraints"; fi
  pip+=(--upgrade --upgrade-strategy eager --constraint "$constraints")
  step "Installing the $versions versions for ligerzoo[$extras]" "${pip[@]}" --requirement "$requirements"
  step "Installing ligerzoo" "${pip[@]}" --no-deps --editable .
  if [ "$versions" = newest ]; then
    step "Installing other engines" "${pip[@]}" --no-deps --requirement tools/engines.txt
  fi
fi
# On all cores; pip uses one. Leaves out half of the source, of which Python compiles what it imports. Some packages have
# files for other versions of Python, which cannot be compiled.
unused='/(tests|models|sklearn|nltk|mypy|pip)/'
step "Compiling to bytecode" sh -c "'$venv/bin/python' -m compileall -qq -j 0 -x '$unused' '$venv/lib' || true"
rm "$venv.incomplete"
