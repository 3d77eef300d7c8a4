# Sourced by the scripts beside it: one environment, .venv in the repository, made and filled only when needed.
#
#   ensure_env EXTRAS      afterwards $PYTHON is the environment's Python and the project is installed with these extras
#
# What is installed is remembered in .venv/installed-EXTRAS: a checksum of everything that it depends on. A second call with
# nothing changed costs some milliseconds. TORCH_REQUIREMENT chooses another torch, BASE_PYTHON another Python to start from.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH_REQUIREMENT="${TORCH_REQUIREMENT:-torch==2.13.0}"
BASE_PYTHON="${BASE_PYTHON:-python3}"
PYTHON="$REPO/.venv/bin/python"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

ensure_env() {
    local extras="$1" venv="$REPO/.venv" stamp wanted version
    version="$("$BASE_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" ||
        fail "there is no $BASE_PYTHON; install Python 3.10 or newer, or set BASE_PYTHON to one"
    "$BASE_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$BASE_PYTHON is Python $version, but 3.10 or newer is needed; set BASE_PYTHON to a newer one"

    stamp="$venv/installed-${extras//,/-}"
    wanted="$({ cat "$REPO/pyproject.toml"; echo "$extras $REPO $version $TORCH_REQUIREMENT"; } | cksum)"
    if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi

    # Two scripts started at once must not install into each other.
    if command -v flock >/dev/null; then
        exec 9<"$REPO/pyproject.toml"
        flock 9
        if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
            exec 9<&-
            return
        fi
    fi

    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        echo "making an environment in $venv (Python $version)" >&2
        "$BASE_PYTHON" -m venv --clear "$venv" ||
            fail "$BASE_PYTHON cannot make an environment; on Debian and Ubuntu install python3-venv"
    fi
    echo "installing $TORCH_REQUIREMENT and torchft_ckpt[$extras]; the first time this takes a minute or more" >&2
    "$PYTHON" -m pip install --quiet --disable-pip-version-check "$TORCH_REQUIREMENT" >&2 ||
        fail "installing $TORCH_REQUIREMENT failed; the lines above say why"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$REPO[$extras]" >&2 ||
        fail "installing torchft_ckpt[$extras] failed; the lines above say why"
    echo "$wanted" >"$stamp"
    if command -v flock >/dev/null; then
        exec 9<&-
    fi
}
