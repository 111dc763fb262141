#!/bin/sh
# Builds wheel and sdist of this checkout: docker/build-wheel.sh FOLDER
# Needs setuptools; PYTHON overrides python3.
set -eu

folder=${1:?"usage: $0 FOLDER"}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-python3}

mkdir -p "$folder"
folder=$(CDPATH='' cd -- "$folder" && pwd)
# A copy: nothing is written into the checkout, and symlinks into the package become files.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cd "$root"
cp -RL pyproject.toml requirements.lock MANIFEST.in README.md LICENSE src docker helm "$copy"
mkdir "$copy/docs"
cp -R docs/grafana "$copy/docs"
find "$copy" -name __pycache__ -type d -prune -exec rm -rf {} +
cd "$copy"
"$python" -c 'import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))' "$folder"
"$python" -c 'import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))' "$folder"
