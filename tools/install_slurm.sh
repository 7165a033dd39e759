#!/usr/bin/env bash
# Install Slurm, munge and iproute2 for the tests on virtual nodes; configures and starts no service.
# Without root it installs nothing, and those tests are skipped.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

missing=""
for name in munged mungekey slurmctld slurmd sbatch srun scontrol ip; do
    command -v "$name" >/dev/null || missing=$name
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install: $missing is missing (Debian's packages slurm-wlm, munge and iproute2): tests of Slurm jobs will be skipped" >&2
    exit 0
fi
apt-get update -q
# Without this policy the packages start services of a cluster that is not configured.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get install -y -q --no-install-recommends slurm-wlm munge iproute2
