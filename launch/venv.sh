#!/usr/bin/env bash
# `make venv`: gives this clone its environment, .venv.
#
# The dependencies are large and slow to install, so they lie in a cache that clones share, keyed
# by setup.py (the only file that names dependencies) and the Python version. `.venv` itself is
# small and belongs to this clone alone: a .pth file brings in the cached packages, and the clone
# is installed into it, editable. So SGLang finds this clone's plugin without PYTHONPATH, and a
# clone that is deleted breaks no other.
#
#   PYTHON            the interpreter to use (default: the first fitting one on PATH)
#   FASER_VENV_CACHE  where environments are kept (default: ~/.cache/faser-sglang/venvs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CACHE="${FASER_VENV_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/faser-sglang/venvs}"
mkdir -p "$CACHE"
CACHE=$(cd "$CACHE" && pwd)
readonly CACHE
readonly NEEDED_GB=11
readonly HEARTBEAT_S=20
readonly BASES=(python3.11 python3.12 python3.13 python3)

say() { echo "venv: $*"; }
die() { echo "venv: $*" >&2; exit 1; }

choose_python() {
  local candidate
  for candidate in ${PYTHON:-"${BASES[@]}"}; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer with its venv module was found (tried ${PYTHON:-${BASES[*]}});" \
    "install one (Debian, Ubuntu: apt-get install python3-venv) or name it with PYTHON=/path."
}

key_of() { # of an interpreter: the first 16 hex digits over setup.py and the Python version
  { cat setup.py; "$1" --version; uname -m; } | sha256sum | cut -c 1-16
}

is_complete() { # whether the cached environment was finished and its interpreter still runs
  [ -f "$1/complete" ] && "$1/bin/python" -c '' 2>/dev/null
}

# Installs what setup.py asks for into the environment at $1, and not the project itself: the
# copy beside it holds the metadata and no package.
build() {
  local env=$1 log=$1.log began=$SECONDS
  local free_gb=$(($(df -Pk "$CACHE" | awk 'NR == 2 { print $4 }') / 1048576))
  [ "$free_gb" -ge "$NEEDED_GB" ] ||
    die "$CACHE has ${free_gb} GB free and needs $NEEDED_GB; free some, or name another place" \
      "with FASER_VENV_CACHE=/path."
  rm -rf "$env" "$env.project"
  mkdir "$env.project"
  cp setup.py pyproject.toml README.md "$env.project"
  say "installing the dependencies into $env (about 10 GB, several minutes; log: $log)"
  "$python" -m venv "$env" >"$log" 2>&1 || fail "$log" "the environment could not be created"
  watch "$log" "$began" "$env/bin/python" -m pip install --progress-bar off \
    "setuptools>=69" "$env.project[test,bench,demo]"
  "$env/bin/python" -m pip uninstall --yes faser-sglang >>"$log" 2>&1
  rm -rf "$env.project"
  touch "$env/complete"
  say "dependencies installed in $((SECONDS - began)) s"
}

watch() { # runs a command with its output in a log, and says now and then how far it is
  local log=$1 began=$2
  shift 2
  "$@" >>"$log" 2>&1 9>&- </dev/null &
  child=$!
  local next=$((SECONDS + HEARTBEAT_S))
  while kill -0 "$child" 2>/dev/null; do
    if [ "$SECONDS" -ge "$next" ]; then
      next=$((SECONDS + HEARTBEAT_S))
      say "installing, $((SECONDS - began)) s ($(last_step "$log" "$env"))"
    fi
    sleep 1
  done
  local status=0
  wait "$child" || status=$?
  child=
  [ "$status" = 0 ] || fail "$log" "pip could not install the dependencies (exit status $status)"
}

last_step() { # LOG ENV: what pip said last, without warnings and addresses, and the size so far
  local step
  step=$(grep -E '^ *(Collecting|Downloading|Processing|Building|Installing) ' "$1" | tail -n 1 |
    sed -E 's/^ *//; s/ ?(\(from|:|, ).*//; s| [^ ]*/([^ /]*)$| \1|' | cut -c 1-60) || true
  echo "${step:-Starting pip}; $(du -sm "$2" 2>/dev/null | cut -f 1) MB on disk"
}

fail() { # LOG REASON: the end of the log, then the reason
  { grep -v '^ *WARNING' "$1" || true; } | tail -n 15 | cut -c 1-300 >&2
  die "$2; the whole log is $1. Run this again when the cause is gone."
}

# Makes .venv on top of the cached environment at $1.
link() {
  local env=$1 began=$SECONDS
  if [ -e .venv ] || [ -L .venv ]; then
    [ -f .venv/linked-by-faser ] || [ -L .venv ] || [ -z "$(ls -A .venv)" ] ||
      die ".venv exists and was not made by make venv; move it away first."
    rm -rf .venv
  fi
  mkdir .venv
  touch .venv/linked-by-faser # of this script from the start; filled when all is done
  "$env/bin/python" -m venv --without-pip .venv
  local here shared
  here=$(site_packages .venv) shared=$(site_packages "$env")
  # addsitedir also runs the .pth files of the cached packages, which a plain path would not.
  echo "import site; site.addsitedir('$shared')" >"$here/faser-dependencies.pth"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --editable . >"$env.link.log" 2>&1 ||
    fail "$env.link.log" "this clone could not be installed into .venv"
  link_scripts "$env"
  echo "$PWD $env" >.venv/linked-by-faser
  say ".venv made in $((SECONDS - began)) s"
}

site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Commands of the cached packages: scripts in Python run under .venv's interpreter, which knows the
# clone; programs (ninja, ruff) are linked.
link_scripts() {
  local env=$1 file name
  for file in "$env"/bin/*; do
    name=${file##*/}
    if [ -e ".venv/bin/$name" ] || [[ $name == python* ]]; then
      continue
    elif head -n 3 "$file" | grep -aqF "$env/bin/python"; then
      printf '#!/bin/sh\nexec %q %q "$@"\n' "$PWD/.venv/bin/python" "$file" >".venv/bin/$name"
      chmod +x ".venv/bin/$name"
    else
      ln -s "$file" ".venv/bin/$name"
    fi
  done
}

child=
trap '[ -z "$child" ] || kill "$child" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

python=$(choose_python)
env=$CACHE/$(key_of "$python")
if is_complete "$env" && [ "$(cat .venv/linked-by-faser 2>/dev/null)" = "$PWD $env" ] &&
  .venv/bin/python -c 'import faser_sglang' 2>/dev/null; then
  exit 0
fi
exec 9>"$env.lock"
if ! flock --nonblock 9; then
  say "waiting for another process that builds $env"
  flock 9
fi
is_complete "$env" || build "$env"
link "$env"
