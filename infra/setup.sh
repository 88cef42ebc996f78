#!/bin/sh
# Make a virtual environment ready: `sh infra/setup.sh VENV run|dev`. Does nothing where that is done already.
set -eu
venv=$1 kind=$2
torch="torch==2.14.1 torchvision==0.29.1"
key=$(cat requirements.lock pyproject.toml infra/setup.sh | cksum | tr ' ' '-')
stamp="$venv/.ready-$kind-$key"
[ -e "$stamp" ] && exit 0

say() { printf '[set-up] %s\n' "$*"; }
fail() {
    printf 'set-up failed: %s\n' "$*" >&2
    exit 1
}

find_python() {
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv on PATH (Debian, Ubuntu: apt-get install python3 python3-venv)"
}

check_compiler() { # pesq, the speech quality metric, is published as source only
    "$venv/bin/python" -c 'import pesq' 2>/dev/null && return
    command -v "${CC:-cc}" >/dev/null || command -v gcc >/dev/null ||
        fail "no C compiler (Debian, Ubuntu: apt-get install gcc; macOS: xcode-select --install)"
    include=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    [ -e "$include/Python.h" ] ||
        fail "Python's C headers are not in $include (Debian, Ubuntu: apt-get install python3-dev)"
}

choose_index() { # an explicit choice, else CPU wheels where there is no NVIDIA device, else the default build
    if [ -n "${TORCH_INDEX:-}" ]; then
        echo "$TORCH_INDEX"
    elif [ "$(uname)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then
        cpu=https://download.pytorch.org/whl/cpu
        # The alarm also ends a name look-up that hangs, which a time-out of the request does not.
        "$venv/bin/python" -c "import signal, urllib.request as u; signal.alarm(4); u.urlopen('$cpu/torch/', timeout=3)" \
            >/dev/null 2>&1 && echo $cpu
    fi
    return 0
}

has_torch() { # of either build: 2.14.1+cpu is 2.14.1
    "$venv/bin/python" - $torch 2>/dev/null <<'END'
import sys
from importlib.metadata import version
pins = (pin.split("==") for pin in sys.argv[1:])
sys.exit(any(version(name).partition("+")[0] != pinned for name, pinned in pins))
END
}

install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile -c requirements.lock "$@" \
        >>"$venv/set-up.log" 2>&1 ||
        { tail -n 15 "$venv/set-up.log" >&2 && fail "pip install $* (whole output: $venv/set-up.log)"; }
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "1/3 virtual environment $venv, $("$python" --version)"
    "$python" -m venv --clear "$venv" || fail "$python -m venv $venv"
fi
check_compiler
if has_torch; then
    say "2/3 $torch: there already"
else
    index=$(choose_index)
    say "2/3 $torch from ${index:-the default index} (the largest download; output in $venv/set-up.log)"
    # shellcheck disable=SC2086 # two requirements, two words
    install $torch ${index:+--extra-index-url "$index"}
fi
if [ "$kind" = dev ]; then
    say "3/3 the other packages and the tools for tests, at the versions of requirements.lock"
    install -e '.[dev]'
    touch "$venv/.ready-run-$key"
else
    say "3/3 the other packages, at the versions of requirements.lock"
    install -e .
fi
touch "$stamp"
say "done"
