#!/usr/bin/env bash
# Find Chromium, or install Debian's headless build of it. Without root it says which package to install.
set -euo pipefail
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
package=chromium-headless-shell
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install: no Chromium found; install the package $package (apt-get install $package), or set browser.executable" >&2
    exit 1
fi
apt-get update -q
apt-get install -y -q --no-install-recommends "$package"
