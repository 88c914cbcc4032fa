#!/usr/bin/env bash
# Runs tests/cpp/levels.cc in an emulated processor with AVX-512, for machines without it: boots a Linux kernel in Bochs
# and ends with the program's verdict. Takes about four minutes. Needs, on Debian:
#   apt-get install bochs bochs-term bochsbios isolinux syslinux-common xorriso cpio cmake ninja-build g++
# and downloads a kernel package, which is unpacked and not installed; KERNEL=<path of a vmlinuz> saves that.
# An argument names the one operator to run. TIME_LIMIT is in seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/emulator
for tool in bochs xorriso cpio cmake ninja g++ script; do
  command -v $tool > /dev/null || { echo "$tool is needed; see the head of $0" >&2; exit 2; }
done
mkdir -p "$work/kernel"

cmake -S . -B "$work/library" -G Ninja -DCERBERUS_AVX512=ON > "$work/build.log"
cmake --build "$work/library" >> "$work/build.log"
cmake --install "$work/library" --prefix "$work/prefix" >> "$work/build.log"
cmake -S tests/cpp -B "$work/programs" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix" \
  >> "$work/build.log"
cmake --build "$work/programs" >> "$work/build.log"

if [ -z "${KERNEL:-}" ]; then
  KERNEL=$(find "$work/kernel" -name 'vmlinuz-*' | head -n 1)
  if [ -z "$KERNEL" ]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '$1 == "Depends:" { print $2; exit }')
    (cd "$work" && apt-get download "$package" && dpkg-deb -x "$package"_*.deb kernel && rm "$package"_*.deb)
    KERNEL=$(find "$work/kernel" -name 'vmlinuz-*' | head -n 1)
  fi
fi

# The initial file system: the program and its libraries, each where the program looks for it.
rm -rf "$work/root" "$work/disk"
mkdir -p "$work/root/dev" "$work/disk"
gcc -O1 -static -o "$work/root/init" tests/emulator/init.c
cp "$work/programs/levels" "$work/root/levels"
for library in $(ldd "$work/root/levels" | grep -o '/[^ ]*'); do
  mkdir -p "$work/root$(dirname "$library")"
  cp -L "$library" "$work/root$library"
done
(cd "$work/root" && find . | cpio -o -H newc --quiet | gzip -1 > "$work/disk/initrd.gz")
cp "$KERNEL" "$work/disk/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/disk"
sed "s/APPEND .*/& operator=${1:-}/" tests/emulator/isolinux.cfg > "$work/disk/isolinux.cfg"
xorriso -as mkisofs -quiet -o "$work/boot.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$work/disk" 2> "$work/xorriso.log"

# Debian's Bochs has a debugger, which waits for the command to start, and draws its screen on a terminal.
sed "s#FOLDER#$work#" tests/emulator/bochsrc > "$work/bochsrc"
echo continue > "$work/commands"
rm -f "$work/serial.log"
TERM=vt100 script -qec "bochs -q -f '$work/bochsrc' -rc '$work/commands'" /dev/null < /dev/null > "$work/screen.log" 2>&1 &
machine=$!
trap 'kill $machine 2> /dev/null || true' EXIT
for ((second = 0; second < ${TIME_LIMIT:-600}; ++second)); do
  sleep 1
  if ! kill -0 $machine 2> /dev/null || grep -qs '^VERDICT' "$work/serial.log"; then break; fi
done

test -s "$work/serial.log" || { echo "the machine did not start; see $work/screen.log" >&2; exit 2; }
tail -n 15 "$work/serial.log"
grep -q '^VERDICT' "$work/serial.log" || { echo "no verdict within $second s" >&2; exit 1; }
grep -q '^baseline avx2 avx512' "$work/serial.log" || { echo "the AVX-512 level did not run" >&2; exit 1; }
grep -q '^VERDICT PASS' "$work/serial.log"
