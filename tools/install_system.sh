#!/usr/bin/env bash
# Install the system packages that are missing: Chromium, and two libraries that a bare Debian lacks.
# Without root it lists the packages to install. Playwright's own Chromium is as good: docs/slurm.md#chromium-without-root
set -euo pipefail

packages=()
chromium=""
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then chromium=$name; fi
done
playwright=${PLAYWRIGHT_BROWSERS_PATH:-$HOME/.cache/ms-playwright}
for name in "$playwright"/chromium_headless_shell-*/*/chrome-headless-shell "$playwright"/chromium-*/*/chrome; do
    if [ -x "$name" ]; then chromium=$name; fi
done
[ -n "$chromium" ] || packages+=(chromium-headless-shell)
has_library() { "${PYTHON:-python3}" -c "import ctypes; ctypes.CDLL('$1')" 2>/dev/null; }
has_library libatomic.so.1 || packages+=(libatomic1) # Playwright's driver
has_library libnuma.so.1 || packages+=(libnuma1)     # vLLM's CPU build

[ ${#packages[@]} != 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install: missing on this system; install it first: apt-get install ${packages[*]}" >&2
    [ -n "$chromium" ] || echo "install: Chromium without root: .venv/bin/playwright install chromium-headless-shell" >&2
    exit 1
fi
apt-get update -q
apt-get install -y -q --no-install-recommends "${packages[@]}"
