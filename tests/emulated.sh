#!/bin/bash
# Runs tests of the C kernels as a machine of the other kind would, x86-64 on aarch64 and the other way
# round, by Debian's qemu-user: only whether they are right, as an emulated core's times say nothing.
# Needs Debian with qemu-user and the other machine's compiler, and network for its packages, which
# stay in build/.
#
#   tests/emulated.sh [what pytest is to run]
set -euo pipefail
cd "$(dirname "$0")/.."
case $(uname -m) in
aarch64) machine=x86_64 debian=amd64 cpu=max compiled_for=-march=haswell compiler=gcc-x86-64-linux-gnu ;;
*) machine=aarch64 debian=arm64 cpu=neoverse-n1 compiled_for=-mcpu=neoverse-n1 compiler=gcc-aarch64-linux-gnu ;;
esac
folder=$PWD/build/$machine
root=$folder/root site=$folder/site libraries=$folder/root/usr/lib/$machine-linux-gnu
tests=("$@")
if [ $# = 0 ]; then
    for name in stored best linear capture softmax pointwise attention noise; do
        tests+=("tests/unit/kernels/test_$name.py")
    done
    tests+=(tests/unit/workers/test_guessing.py tests/unit/workers/test_scoring.py)
fi

for program in qemu-$machine $machine-linux-gnu-gcc apt-get dpkg-deb; do
    command -v $program >/dev/null || {
        echo "$program is missing; install qemu-user and $compiler on Debian." >&2
        exit 1
    }
done

# Debian's Python and torch for that machine, beside what is installed here: torch's own wheels for
# x86-64 want gigabytes of libraries for GPUs.
if [ ! -e "$root/.unpacked" ]; then
    mkdir -p "$folder"/{debs,root,lists/partial,archives/partial}
    : >"$folder/status"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -vm1 security)
    key=/usr/share/keyrings/debian-archive-keyring.gpg
    echo "deb [signed-by=$key] $mirror trixie main" >"$folder/sources.list" # the first with such a torch
    cat >"$folder/apt.conf" <<EOF
APT::Architecture "$debian";
APT::Architectures { "$debian"; };
Dir::Etc::sourcelist "$folder/sources.list";
Dir::Etc::sourceparts "-";
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
    packages=$(apt-cache depends "${only[@]}" python3 python3-torch python3-scipy | grep '^\w' | grep -v : | sort -u)
    (cd "$folder/debs" && apt-get -q download $packages)
    for package in "$folder"/debs/*.deb; do dpkg-deb -x "$package" "$root"; done
    rm -r "$folder/debs"
    for name in bin lib lib64; do [ ! -e "$root/usr/$name" ] || ln -sfn "usr/$name" "$root/$name"; done
    touch "$root/.unpacked"
fi

if [ ! -e "$site/.unpacked" ]; then
    platforms=(--platform any)
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${tag}_$machine")
    done
    version=$(ls "$root"/usr/bin/python3.* | grep -o '3\.[0-9]*$')
    .venv/bin/pip download -q "${platforms[@]}" --python-version "$version" --only-binary :all: \
        -d "$folder/wheels" transformers safetensors gguf msgpack pyyaml fastapi grpcio protobuf \
        hypothesis pytest pytest-timeout
    for wheel in "$folder"/wheels/*.whl; do .venv/bin/python -m zipfile -e "$wheel" "$site"; done
    rm -r "$folder/wheels"
    touch "$site/.unpacked"
fi

# The bundled weights are the same for every machine.
weights=$(.venv/bin/python -c "from outrider.checkpoints.resolve import resolve_source as r; print(r('smollm2-135m-instruct').parent)")
ln -sfn "$weights" "$site/$(basename "$weights")"

# Compiling is this machine's, for that one.
mkdir -p "$folder/bin"
cat >"$folder/bin/cc" <<EOF
#!/bin/bash
exec $machine-linux-gnu-gcc "\${@/#-march=native/$compiled_for}"
EOF
chmod +x "$folder/bin/cc"

run=(qemu-$machine -cpu $cpu -L "$root"
    -E PYTHONPATH="src:$site" -E PATH="$folder/bin:/usr/bin:/bin" -E OUTRIDER_CACHE="$folder/cache"
    -E LD_LIBRARY_PATH="$libraries/blas:$libraries/lapack" "$root/usr/bin/python3")
# Before the tests, and again if need be: a process that an emulated one starts may hang.
for attempt in 1 2 3; do
    timeout -k 5 900 "${run[@]}" -c "from outrider.kernels.cpu.build import library_path; library_path()" && break
    [ $attempt -lt 3 ]
done
exec "${run[@]}" -m pytest -q -p no:cacheprovider --timeout 3000 "${tests[@]}"
