#!/usr/bin/env bash
# The main job, on a real engine and on the simulated rig. Needs neither Docker, nor root, nor a GPU.
# Runs every step, and ends with a status other than 0 if any of them failed.
set -uo pipefail
cd "$(dirname "$0")/.."

export PATH=$PWD/.venv/bin:$PATH
export BISECT_JOURNALS=.cache/demo
rm -rf "$BISECT_JOURNALS"
mkdir -p "$BISECT_JOURNALS" || exit 4
unset BISECT_DEBUG
failed=()
steps=0

step() { # step TITLE COMMAND…
  local title=$1 status begun=$SECONDS
  shift
  steps=$((steps + 1))
  printf '\n== %s\n$ %s\n' "$title" "$*"
  "$@" </dev/null
  status=$?
  if [[ $status -eq 0 ]]; then
    printf -- '-- done in %s s\n' $((SECONDS - begun))
  else
    printf -- '-- FAILED with exit status %s after %s s\n' "$status" $((SECONDS - begun))
    failed+=("$title")
  fi
  if [[ $status -eq 130 ]]; then
    exit 130
  fi
}

echo "The demo's journals are in $BISECT_JOURNALS (for your own look: export BISECT_JOURNALS=$BISECT_JOURNALS)."

step "A real llama-server as a process: the longest prompt it serves within the time budget" \
  bisect ceiling --profile tiny-recall --axis prompt --runner process --study demo-real
step "Simulated 24 GiB card: how far can mem-util go before a 60K prompt dies?" \
  bisect ceiling --profile long-text --axis mem-util --prompt 60k --runner simulated --study demo-long-text
step "Simulated: how much context may be declared? (200K is refused at admission, with the engine's estimate)" \
  bisect ceiling --profile long-text --axis max-model-len --runner simulated --study demo-200k
step "Simulated, without MTP: the longest prompt with 200K declared (bound by time, not by memory)" \
  bisect ceiling --profile long-text-no-mtp --axis prompt --runner simulated --study demo-no-mtp
step "The shipping point as a compose override" \
  bisect export demo-long-text --to compose
step "The shipping point as a table row" \
  bisect export demo-long-text --to markdown

echo
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "demo: ${#failed[@]} of $steps steps failed:"
  printf '  %s\n' "${failed[@]}"
  exit 1
fi
echo "demo: all $steps steps done in $SECONDS s"
