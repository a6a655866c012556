# Makes the Python environment of the launch scripts; meant to be sourced by bash, which then has $PYTHON.
#
#   sao_environment NAME [pip arguments...]
#
# makes $SAO_VENV (default: .venv in the repository root) and installs, once, what the arguments after NAME say. A stamp with the hash of the
# requirement files tells that an installation was finished; a half-finished one is taken up again.

SAO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SAO_VENV="${SAO_VENV:-$SAO_ROOT/.venv}"
PYTHON="$SAO_VENV/bin/python"

sao_fail() {
  echo "Error: $*" >&2
  exit 1
}

# Prints the first Python of at least 3.11; SAO_PYTHON names another one.
sao_find_python() {
  local candidate
  for candidate in ${SAO_PYTHON:+"$SAO_PYTHON"} python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  sao_fail "Python 3.11 or newer is needed and was not found (python3 is $(python3 --version 2>&1 || true)); install it, or name it in SAO_PYTHON."
}

sao_make_venv() {
  if "$PYTHON" -m pip --version >/dev/null 2>&1; then
    return
  fi
  if "$PYTHON" -c 'import sys' >/dev/null 2>&1; then  # Made by a tool that leaves pip out, or half-made.
    "$PYTHON" -m ensurepip --upgrade >/dev/null || sao_fail "the environment $SAO_VENV has no pip; install pip into it."
    return
  fi
  if [ -e "$SAO_VENV" ] && [ ! -e "$SAO_VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$SAO_VENV")" ]; then
    sao_fail "$SAO_VENV exists and is not a virtual environment; remove it, or name another folder in SAO_VENV."
  fi
  local python
  python="$(sao_find_python)"
  echo "Making a virtual environment in $SAO_VENV with $("$python" --version)."
  "$python" -m venv --clear "$SAO_VENV" ||
    sao_fail "the virtual environment could not be made; on Debian or Ubuntu the package python3-venv is needed."
}

# One line for each requirement file there is, and the Python version: whatever changes it, changes what has to be installed.
sao_fingerprint() {
  cat "$SAO_ROOT"/requirements.txt "$SAO_ROOT"/requirements/*.txt | cksum
  "$PYTHON" --version
}

sao_environment() {
  local name="$1" stamp="$SAO_VENV/sao-installed-$1" fingerprint
  shift
  if command -v flock >/dev/null 2>&1; then  # Two scripts at once: the second waits for the first.
    mkdir -p "$(dirname "$SAO_VENV")"
    exec 9>"$SAO_VENV.lock"
    flock 9
  fi
  sao_make_venv
  fingerprint="$(sao_fingerprint)"
  if [ "$(cat "$stamp" 2>/dev/null || true)" != "$fingerprint" ]; then
    rm -f "$stamp"
    echo "Installing the requirements ($name) into $SAO_VENV; a few minutes the first time."
    while [ "$#" -gt 0 ]; do  # Each argument is one pip command line.
      # shellcheck disable=SC2086
      (cd "$SAO_ROOT" && "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input $1) ||
        sao_fail "pip install $1 failed; its message is above. Run the script again to go on."
      shift
    done
    printf '%s\n' "$fingerprint" >"$stamp"
  fi
  if [ -e /proc/self/fd/9 ] || [ -e /dev/fd/9 ]; then
    exec 9>&-
  fi
}
