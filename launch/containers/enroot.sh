#!/usr/bin/env bash
# Turn the image of launch/containers/Dockerfile into an enroot image, which pyxis runs.
#   launch/containers/enroot.sh [IMAGE [FILE.sqsh]]
# IMAGE: an image of Docker's daemon (default: megatron-webrl:latest), or a URI that enroot knows: docker://..., podman://...
# Use it: CONTAINER=$PWD/FILE.sqsh PYTHON=python3 sbatch ... (docs/slurm.md)
set -euo pipefail
image=${1:-megatron-webrl:latest}
output=${2:-megatron-webrl.sqsh}

if ! command -v enroot >/dev/null; then
    echo "enroot.sh: enroot is not installed on this machine; run this where it is, often a compute node" >&2
    exit 1
fi
if [ -e "$output" ]; then
    echo "enroot.sh: $output exists; remove it, or name another file" >&2
    exit 1
fi
case $image in
    *://*) ;;
    *) image=dockerd://$image ;;
esac
# A job that starts during the import must not see half an image.
partial=$output.partial.$$.sqsh
trap 'rm -f "$partial"' EXIT
enroot import --output "$partial" "$image"
mv "$partial" "$output"
echo "$output: use it with CONTAINER=$(realpath "$output") PYTHON=python3"
