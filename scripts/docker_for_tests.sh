#!/usr/bin/env bash
# What the Docker tests need besides Python: as root on Debian it is installed where it is missing; otherwise it says
# why those tests will be skipped. The tests start a daemon of their own (tests/dockerd.py) and never use another one.
set -euo pipefail

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
packages=()
need() { command -v "$1" >/dev/null || packages+=("$2"); }
need dockerd docker.io
need containerd containerd
need runc runc
need iptables iptables
need ip iproute2

say() { echo "docker_for_tests: $*" >&2; }

if [[ $EUID -ne 0 ]]; then
  say "not root: the Docker tests will be skipped (they start a dockerd of their own)"
  exit 0
fi
if [[ ${#packages[@]} -eq 0 ]]; then
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  say "missing, and no apt-get to install them with: ${packages[*]}; the Docker tests will be skipped"
  exit 0
fi
say "installing ${packages[*]}"
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  "${packages[@]}"; } >&2; then
  if [[ -n ${CI:-} ]]; then
    say "apt-get failed"
    exit 1
  fi
  say "apt-get failed: the Docker tests will be skipped"
fi
