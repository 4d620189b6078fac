#!/usr/bin/env bash
# Runs compute-sanitizer's memcheck, racecheck, synccheck and initcheck over the harness's small
# cases, for every GPU kernel, and shows that a race is caught: the variant with the 128-byte
# stride must be reported. Exits non-zero on any result that is not the expected one.
#
#   tests/harness/sanitize.sh BUILD_DIR [KERNEL...]
#
# BUILD_DIR holds race_harness and race_harness_broken_stride. Kernels default to all of the table.

set -u -o pipefail

if [[ $# -lt 1 || ! -x "$1/race_harness" || ! -x "$1/race_harness_broken_stride" ]]; then
  echo "usage: $0 BUILD_DIR [KERNEL...]; BUILD_DIR holds race_harness{,_broken_stride}" >&2
  exit 2
fi
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
if ! command -v "$sanitizer" > /dev/null; then
  echo "$sanitizer was not found; put it on PATH or name it in COMPUTE_SANITIZER" >&2
  exit 2
fi
harness=$1/race_harness
broken=$1/race_harness_broken_stride
shift
if [[ $# -gt 0 ]]; then
  kernels=("$@")
else
  mapfile -t kernels < <("$harness" --list)
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
unexpected=0
rows=()

# check TOOL EXPECTED(clean|reported) LABEL PROGRAM ARGUMENT...
check() {
  local tool=$1 expected=$2 label=$3 found start=$SECONDS
  shift 3
  "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 5 "$@" > "$log" 2>&1
  local status=$?
  # The tool's own summary line proves that it ran to its end: without one no result is believed.
  local summary
  if [[ $tool == racecheck ]]; then
    summary=$(grep -oE 'RACECHECK SUMMARY: [0-9]+' "$log" | tail -n 1)
  else
    summary=$(grep -oE 'ERROR SUMMARY: [0-9]+' "$log" | tail -n 1)
  fi
  case ${summary##* } in
    '') found=broken ;;
    0) found=clean ;;
    *) found=reported ;;
  esac
  # The harness's own verdict counts where nothing is wrong on purpose.
  [[ $expected == clean && $found == clean && $status -ne 0 ]] && found="harness status $status"
  local verdict=ok
  if [[ $found != "$expected" ]]; then
    verdict=UNEXPECTED
    unexpected=$((unexpected + 1))
    tail -n 40 "$log"
  fi
  rows+=("$(printf '%-12s %-28s %-10s %-10s %4ds  %s' "$tool" "$label" "$expected" "$found" \
    $((SECONDS - start)) "$verdict")")
  echo "${rows[-1]}"
}

for tool in memcheck racecheck synccheck initcheck; do
  for kernel in "${kernels[@]}"; do
    check "$tool" clean "$kernel" "$harness" --kernel "$kernel" --case small --runs 2
  done
done
check racecheck reported "portable, 128-byte stride" \
  "$broken" --kernel portable --case tiles_2 --runs 1

printf '\n%-12s %-28s %-10s %-10s\n' tool kernel expected found
printf '%s\n' "${rows[@]}"
echo "$unexpected unexpected"
[[ $unexpected -eq 0 ]]
