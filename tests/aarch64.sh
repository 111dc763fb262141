#!/bin/bash
# Runs tests of the C kernels as an aarch64 machine would, by Debian's qemu-user: only whether they are
# right, as an emulated core's times say nothing. Needs Debian with qemu-user and gcc-aarch64-linux-gnu,
# and network for the other machine's packages, which stay in build/aarch64.
#
#   tests/aarch64.sh [what pytest is to run]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/aarch64
root=$folder/root site=$folder/site
# The last release with a build for CPUs of this kind on the registry; what is tested here needs no
# newer one.
torch=torch==2.10.0
tests=("$@")
if [ $# = 0 ]; then
    for name in stored linear recording softmax pointwise attention noise; do
        tests+=("tests/unit/kernels/test_$name.py")
    done
fi

for program in qemu-aarch64 aarch64-linux-gnu-gcc apt-get dpkg-deb; do
    command -v $program >/dev/null || {
        echo "$program is missing; install qemu-user and gcc-aarch64-linux-gnu on Debian." >&2
        exit 1
    }
done

# Debian's Python for that machine, beside what is installed here.
if [ ! -e "$root/.unpacked" ]; then
    mkdir -p "$folder"/{debs,root,lists/partial,archives/partial}
    : >"$folder/status"
    cat >"$folder/apt.conf" <<EOF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$folder";
Dir::State::Lists "$folder/lists";
Dir::State::status "$folder/status";
Dir::Cache::archives "$folder/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Debug::NoLocking "1";
EOF
    export APT_CONFIG=$folder/apt.conf
    apt-get -q update
    only=(--recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances)
    packages=$(apt-cache depends "${only[@]}" python3 libstdc++6 libgomp1 | grep '^\w' | grep -v : | sort -u)
    (cd "$folder/debs" && apt-get -q download $packages)
    for package in "$folder"/debs/*.deb; do dpkg-deb -x "$package" "$root"; done
    touch "$root/.unpacked"
fi

if [ ! -e "$site/.unpacked" ]; then
    platforms=(--platform any)
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${tag}_aarch64")
    done
    version=$(ls "$root"/usr/bin/python3.* | grep -o '3\.[0-9]*$')
    download=(.venv/bin/pip download -q "${platforms[@]}" --python-version "$version"
        --only-binary :all: -d "$folder/wheels")
    # By itself: what it says it depends on goes by the machine that asks, and is gigabytes for GPUs.
    "${download[@]}" --no-deps $torch
    "${download[@]}" sympy networkx jinja2 filelock fsspec typing_extensions numpy scipy transformers \
        safetensors gguf msgpack pyyaml fastapi grpcio protobuf hypothesis pytest pytest-timeout
    for wheel in "$folder"/wheels/*.whl; do .venv/bin/python -m zipfile -e "$wheel" "$site"; done
    touch "$site/.unpacked"
fi

# Compiling is this machine's, for that one.
mkdir -p "$folder/bin"
cat >"$folder/bin/cc" <<'EOF'
#!/bin/bash
exec aarch64-linux-gnu-gcc "${@/#-march=native/-mcpu=neoverse-n1}"
EOF
chmod +x "$folder/bin/cc"

run=(qemu-aarch64 -cpu neoverse-n1 -L "$root"
    -E PYTHONPATH="src:$site" -E PATH="$folder/bin:/usr/bin:/bin" -E OUTRIDER_CACHE="$folder/cache"
    "$root/usr/bin/python3")
# Before the tests, and again if need be: a process that an emulated one starts may hang.
for attempt in 1 2 3; do
    timeout -k 5 300 "${run[@]}" -c "from outrider.kernels.cpu.build import library_path; library_path()" && break
    [ $attempt -lt 3 ]
done
exec "${run[@]}" -m pytest -q -p no:cacheprovider --timeout 3000 "${tests[@]}"
