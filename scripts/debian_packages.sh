#!/usr/bin/env bash
# Installs Debian packages where apt-get is there and root or password-less sudo can be had; says so where not.
# Usage: debian_packages.sh PACKAGE ...
set -euo pipefail

if ! command -v apt-get >/dev/null; then
  echo "no apt-get here; please install by hand: $*" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! sudo -n true 2>/dev/null; then
    echo "neither root nor password-less sudo; please install by hand: $*" >&2
    exit 1
  fi
  as_root=(sudo -n)
fi
# RUNLEVEL=1 keeps a package's service from starting: only its programs are wanted.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -q -o Acquire::Retries=3)
"${apt[@]}" update >/dev/null
"${apt[@]}" install -y --no-install-recommends "$@" >/dev/null
