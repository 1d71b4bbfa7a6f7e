#!/bin/sh
# Makes the virtual environment for `make demo` or `make test`, once; quick when it is there already.
#
#   packaging/prepare.sh demo|test [VENV]
#
# Needs Python 3.11 to 3.13 with its headers, and, because a dependency of libp2p has no wheels, a C compiler and
# the headers of GMP. What is missing is installed by apt-get where this runs as root, and named otherwise. The same
# compiler makes the engine's kernels when it first starts.
# PYTHON names an interpreter to use.
set -eu

purpose=${1:?demo or test}
venv=${2:-.venv}
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*"; }
fail() { printf 'prepare: %s\n' "$*" >&2; exit 2; }

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }
has_headers() {
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'
}
has_gmp() { printf '#include <gmp.h>\n' | cc -E - >/dev/null 2>&1; }

find_python() {
    for name in ${PYTHON:-python3.12 python3.13 python3.11 python3}; do
        if command -v "$name" >/dev/null && usable "$name"; then
            command -v "$name"
            return
        fi
    done
}

missing=""
python=$(find_python)
if [ -n "${PYTHON:-}" ] && [ -z "$python" ]; then
    fail "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
fi
[ -n "$python" ] || missing="$missing python3"
{ [ -n "$python" ] && has_venv "$python"; } || missing="$missing python3-venv"
{ [ -n "$python" ] && has_headers "$python"; } || missing="$missing python3-dev"
command -v cc >/dev/null || missing="$missing gcc libc6-dev"
{ command -v cc >/dev/null && has_gmp; } || missing="$missing libgmp-dev"

# A wheel from an earlier installation may make the compiler needless, so only a new environment asks for it.
if [ -n "$missing" ] && [ ! -x "$venv/bin/python" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Installing system packages:$missing"
        apt-get update -qq >/dev/null
        # shellcheck disable=SC2086 # a list of words
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
        python=$(find_python)
        [ -n "$python" ] || fail "the system's Python is not 3.11, 3.12 or 3.13: install one, or name it by PYTHON="
    else
        fail "system packages are missing:$missing
On Debian and Ubuntu: sudo apt-get install$missing
On Fedora: sudo dnf install python3-devel gcc gmp-devel; on macOS: xcode-select --install and brew install gmp"
    fi
fi

if [ ! -x "$venv/bin/python" ]; then
    say "Making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Installing again takes seconds even when nothing has changed, so what was installed is noted.
state="$(cksum <pyproject.toml) $PWD"
stamp="$venv/.installed-$purpose"
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$state" ]; then
    exit 0
fi
case $purpose in
demo)
    say "Installing kvasir-peer with onnxruntime (about two minutes the first time)"
    pip install -q -e '.[onnx,bridge]'
    ;;
test)
    say "Installing torch (some minutes the first time)"
    pip install -q torch==2.13.0
    say "Installing kvasir-peer with everything that its tests need"
    pip install -q -e '.[test,torch]'
    # libp2p pulls in trio-typing, whose outdated stubs mypy would take instead of the types in trio itself.
    rm -rf "$venv"/lib/python3*/site-packages/trio-stubs
    ;;
*)
    fail "$purpose: say demo or test"
    ;;
esac
printf '%s\n' "$state" >"$stamp"
