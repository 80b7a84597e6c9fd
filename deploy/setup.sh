#!/bin/sh
# Makes the virtual environment: setup.sh PYTHON VENV. Repeating it does no harm.
set -eu
python=${1:-}
venv=$2

say() { printf '%s\n' "setup: $*"; }
can_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }
apt_install() {
  DEBIAN_FRONTEND=noninteractive
  export DEBIAN_FRONTEND
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null 2>&1
}

if [ -z "$python" ]; then
  say "Python 3.11 or newer is needed (macOS: brew install python; Debian: apt install python3-venv)." >&2
  exit 1
fi

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  say "$venv with $("$python" --version)"
  # Debian keeps ensurepip in a package of its own.
  if ! "$python" -c 'import ensurepip' 2>/dev/null && can_apt; then
    apt_install python3-venv || true
  fi
  "$python" -m venv --clear "$venv"
fi

say "installing stateroom and its tools (a few minutes the first time)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev]'

# mlx's CPU wheel brings the reference BLAS; OpenBLAS makes prefill about ten times faster.
fast_blas() {
  "$venv/bin/python" -c 'import sys; from stateroom.daemon.blas import find_blas; sys.exit(find_blas().hint is not None)'
}
if ! fast_blas; then
  if can_apt && apt_install libopenblas0-pthread; then
    say "installed OpenBLAS (libopenblas0-pthread)"
  else
    say "without an NVIDIA GPU, install OpenBLAS for a much faster prefill: sudo apt install libopenblas0-pthread"
    say "(Fedora: openblas-threads; Arch: openblas). 'stateroom doctor' says which one is in use."
  fi
fi
