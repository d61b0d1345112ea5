#!/usr/bin/env bash
# Builds .venv: torch first, then this project (editable) with its dev and docs extras, all from
# constraints.txt. Does nothing when the inputs have not changed since the last successful run.
#
# PYTHON      interpreter to build with, 3.10 to 3.13 (default: the first that fits)
# TORCH_SPEC  torch requirement instead of the pinned one, pip options included
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.bootstrap
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

say() { printf '%s\n' "bootstrap: $*" >&2; }
die() { say "$*"; exit 1; }

minor_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

supported() {
    case "$(minor_of "$1")" in 3.10 | 3.11 | 3.12 | 3.13) ;; *) return 1 ;; esac
}

choose_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10 to 3.13."
        echo "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if supported "$name"; then
            echo "$name"
            return
        fi
    done
    die "no Python 3.10 to 3.13 on PATH; install one or name it with PYTHON=."
}

# Installed version of a distribution in the environment; empty when it is not there.
version_of() {
    "$venv/bin/python" -c "
from importlib import metadata
try:
    print(metadata.version('$1'))
except metadata.PackageNotFoundError:
    pass"
}

has_nvidia_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

install_torch() {
    local pinned installed
    pinned=$(sed -n 's/^torch==//p' constraints.txt)
    if [ -n "${TORCH_SPEC:-}" ]; then
        # Unquoted: the requirement may bring pip options along.
        # shellcheck disable=SC2086
        "${pip[@]}" install -c "$1" $TORCH_SPEC
        return
    fi
    installed=$(version_of torch)
    if [ "${installed%%+*}" = "$pinned" ]; then
        return
    fi
    if ! has_nvidia_gpu; then
        say "no NVIDIA GPU: looking for a CPU build of torch $pinned"
        if "${pip[@]}" install -c "$1" "torch==$pinned+cpu" 2>/dev/null; then
            return
        fi
        say "pip finds none; installing the default build"
    fi
    "${pip[@]}" install -c "$1" "torch==$pinned"
}

inputs=$(cat pyproject.toml constraints.txt scripts/bootstrap.sh | cksum)
recorded_inputs= recorded_torch=
if [ -f "$stamp" ]; then
    { read -r recorded_inputs && read -r recorded_torch; } <"$stamp" || true
fi
torch_spec=${TORCH_SPEC:-$recorded_torch}

if [ -n "${PYTHON:-}" ] && [ -x "$venv/bin/python" ] &&
    [ "$(minor_of "$PYTHON")" != "$(minor_of "$venv/bin/python")" ]; then
    say "rebuilding $venv for $PYTHON"
    rm -rf "$venv"
elif [ "$recorded_inputs" = "$inputs" ] && [ "$recorded_torch" = "$torch_spec" ] &&
    [ -x "$venv/bin/python" ]; then
    exit 0
fi

TORCH_SPEC=$torch_spec
if [ ! -x "$venv/bin/python" ]; then
    python=$(choose_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python lacks the venv module; install it (Debian, Ubuntu: python3-venv)."
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
rm -f "$stamp"

# torch decides its own triton, so the first step pins neither of the two.
rest=$venv/constraints-rest.txt
grep -vE '^(torch|triton)==' constraints.txt >"$rest"
say "installing torch"
install_torch "$rest"

chosen=$venv/constraints.txt
triton=$(version_of triton)
[ -n "$triton" ] || triton=$(sed -n 's/^triton==//p' constraints.txt)
cp "$rest" "$chosen"
printf 'torch==%s\ntriton==%s\n' "$(version_of torch)" "$triton" >>"$chosen"

say "installing csa-dispatch and its tools"
"${pip[@]}" install -c "$chosen" setuptools
"${pip[@]}" install -c "$chosen" --no-build-isolation -e '.[dev,docs]'

printf '%s\n%s\n' "$inputs" "$torch_spec" >"$stamp"
say "$venv is ready: torch $(version_of torch), triton $(version_of triton)"
