#!/usr/bin/env bash
# Transformer Engine for the torch of PYTHON, a Python with pip; the image and installations without one use it alike.
#   launch/containers/transformer_engine.sh build PYTHON FOLDER     # write the wheel of its PyTorch part to FOLDER
#   launch/containers/transformer_engine.sh install PYTHON FOLDER   # install it, with all that it needs
# The PyTorch part has no wheels: it is built against torch. The CUDA headers are those of the wheels that torch was
# installed with, so g++ and Python's headers are enough. MAX_JOBS: compilers at a time.
set -euo pipefail
version=2.20.2

usage="usage: transformer_engine.sh build|install PYTHON FOLDER"
action=${1:?$usage} python=${2:?$usage} folder=${3:?$usage}
case $action in
    build)
        cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
        if [ -z "$cuda" ]; then
            echo "transformer_engine.sh: the torch of $python is built for CPUs; install the GPU packages first" >&2
            exit 1
        fi
        before=$(mktemp) after=$(mktemp)
        list() { "$python" -m pip list --format=freeze --exclude-editable | sort; }
        put_back() { # what the build adds and replaces: torch and vLLM were installed with other versions
            list >"$after"
            comm -13 <(cut -d= -f1 "$before" | sort) <(cut -d= -f1 "$after" | sort) |
                xargs -r "$python" -m pip uninstall --yes
            comm -23 "$before" "$after" | xargs -r "$python" -m pip install --no-deps
            rm -f "$before" "$after"
        }
        list >"$before"
        trap put_back EXIT
        "$python" -m pip install --no-deps \
            "nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*" ninja pybind11 wheel
        NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
            "$python" -m pip wheel --no-deps --no-build-isolation --no-binary transformer-engine-torch \
            --wheel-dir "$folder" "transformer-engine-torch==$version"
        ;;
    install)
        # No package that is installed changes its version: vLLM was tested with those.
        installed=$(mktemp)
        trap 'rm -f "$installed"' EXIT
        "$python" -m pip list --format=freeze --exclude-editable >"$installed"
        "$python" -m pip install --find-links "$folder" --constraint "$installed" \
            "transformer-engine[core-cu13,pytorch]==$version"
        # megatron-core does without an engine that does not import, so look for the two libraries without a GPU.
        for name in transformer_engine_cu13 transformer_engine_torch; do
            "$python" - "$name" "$version" <<'END'
import importlib.metadata, sys
found = importlib.metadata.distribution(sys.argv[1])
assert found.version == sys.argv[2], f"{sys.argv[1]} is {found.version}, not {sys.argv[2]}"
assert any(str(path).endswith(".so") and path.locate().is_file() for path in found.files or ()), f"{sys.argv[1]} has no .so"
END
        done
        ;;
    *)
        echo "$usage" >&2
        exit 1
        ;;
esac
