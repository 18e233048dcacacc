#!/usr/bin/env bash
# Run numkv's kernel tests as a 64-bit ARM would, emulated by QEMU: slow (a kernel takes a minute or more to compile), so
# name what to run: `tools/on_arm.sh tests/kernels/test_attention_int8.py -k "cpu and h2"`. As root, on Debian on x86-64.
# Python comes from Debian's packages for arm64, unpacked into a folder; wheels come from PyPI. Nothing else is changed,
# but for the package qemu-user-static, and the list of packages for arm64, which is dropped again. Tests that start a
# process of their own fail ("Exec format error"), unless the system runs such files by itself (binfmt_misc).
set -euo pipefail
cd "$(dirname "$0")/.."
place=${NUMKV_ARM:-${TMPDIR:-/tmp}/numkv-arm}
version=$(. /etc/os-release; [ "$VERSION_ID" = 12 ] && echo 3.11 || echo 3.13)  # Debian 12's Python, or a later one's

if [ ! -e "$place/ready" ]; then
  mkdir -p "$place"/{packages,root,site,wheels}
  command -v qemu-aarch64-static >/dev/null || apt-get install -y qemu-user-static
  dpkg --print-foreign-architectures | grep -qx arm64 || { dpkg --add-architecture arm64; added=1; }
  apt-get update
  (
    cd "$place/packages"
    for name in libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 \
      libsqlite3-0 libuuid1 "python$version-minimal" "libpython$version-minimal" "libpython$version-stdlib"; do
      apt-get download "$name:arm64"
    done
    for package in *.deb; do dpkg-deb -x "$package" "$place/root"; done
  )
  [ -z "${added:-}" ] || dpkg --remove-architecture arm64
  platforms=$(for x in 2014 _2_17 _2_27 _2_28; do echo "--platform manylinux${x}_aarch64"; done)
  # shellcheck disable=SC2086
  python3 -m pip download -q $platforms --only-binary=:all: --python-version "$version" -d "$place/wheels" \
    "numba>=0.67" "numpy>=2.0" ml_dtypes safetensors pytest pytest-benchmark hypothesis greenlet
  for wheel in "$place"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$place/site"; done
  touch "$place/ready"
fi

# QEMU shows this machine's /proc/cpuinfo, so LLVM sees no features there: those that every such CPU has are taken.
PYTHONPATH="$place/site:$PWD" NUMBA_CACHE_DIR="$place/kernels" PYTHONDONTWRITEBYTECODE=1 \
  exec qemu-aarch64-static -L "$place/root" "$place/root/usr/bin/python$version" -m pytest -q -p no:cacheprovider "$@"
