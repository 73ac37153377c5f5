#!/usr/bin/env bash
# Installs the Debian packages whose programs the tests of `make test-all` start. Tests that miss
# theirs are skipped, so what cannot be installed is said loudly and fails nothing. Those that only
# `make nightly` needs (buildah, debootstrap) are not here.
set -uo pipefail
packages=(
    redis-server              # tests/tiers, tests/e2e: shared tiers in Valkey
    libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4  # the same in Mooncake
    chromium chromium-driver  # tests/e2e: the dashboard, the admin API in a browser
    prometheus                # tests/deploy: alert rules, with its promtool
    fio                       # tests/bench: floors of disks
)
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed \
        || missing+=("$package")
done
((${#missing[@]})) || exit 0
if ((EUID)) || ! command -v apt-get >/dev/null; then
    echo "services: NOT INSTALLED, their tests are skipped: ${missing[*]}. hint: run as root on Debian" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update || echo "services: apt-get update failed" >&2
for package in "${missing[@]}"; do  # one that is not to be had keeps no other from being installed
    apt-get -qq install --yes --no-install-recommends "$package" >/dev/null \
        || echo "services: NOT INSTALLED, its tests are skipped: $package" >&2
done
exit 0
