# Sourced by the benchmarks beside it: one environment, .venv-bench in the repository, with torchft 0.2.0 beside the project.
#
#   run_bench MODULE ARGUMENTS...   makes the environment when needed, and becomes `python -m MODULE ARGUMENTS...` in it
#
# PYTHON=... chooses the interpreter to start from (3.10 or newer; torchft has wheels for 3.10 to 3.13 on Linux).

bench_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bench_venv="$bench_root/.venv-bench"
bench_name=$(basename "$0")

find_bench_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "$bench_name: no Python 3.10 or newer with the venv module was found; set PYTHON=/path/to/python" >&2
    return 1
}

ensure_bench_env() {
    local stamp="$bench_venv/installed" python pip
    if [[ -f "$stamp" && ! "$bench_root/pyproject.toml" -nt "$stamp" ]]; then
        return
    fi
    python=$(find_bench_python)
    echo "$bench_name: making the environment $bench_venv with $python (once)" >&2
    if [[ ! -x "$bench_venv/bin/python" ]]; then
        "$python" -m venv "$bench_venv"
    fi
    pip=("$bench_venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" "torch==2.13.0"
    if ! "${pip[@]}" --only-binary torchft --editable "$bench_root[bench]"; then
        echo "$bench_name: torchft could not be installed (see above); going on without it" >&2
        "${pip[@]}" --editable "$bench_root"
    fi
    # Without torchft there is no stamp: the next run tries again.
    if "$bench_venv/bin/python" -c 'import torchft' 2>/dev/null; then
        touch "$stamp"
    fi
}

run_bench() {
    local module="$1"
    shift
    ensure_bench_env
    export PYTHONPATH="$bench_root/scripts${PYTHONPATH:+:$PYTHONPATH}"
    exec "$bench_venv/bin/python" -m "$module" "$@"
}
