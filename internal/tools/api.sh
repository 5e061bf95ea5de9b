#!/usr/bin/env bash
# Compares the exported API of every public package with that of the last tag
# (or of the revision named as argument) and fails on an incompatible change.
# apidiff itself exits 0 whatever it finds, so what it prints decides.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"

old=${1:-$(git describe --tags --abbrev=0 2>/dev/null || true)}
if [ -z "$old" ]; then
	echo "api: no tag yet, nothing to compare with"
	exit 0
fi
commit=$(git rev-parse --verify --quiet "$old^{commit}") || { echo "api: $old is no revision" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/old"
git archive "$commit" | tar -x -C "$work/old"
apidiff() { go tool -modfile="$root/internal/tools/go.mod" apidiff "$@"; }

broken=0
cd "$work/old"
packages=$(go list -f '{{if ne .Name "main"}}{{.ImportPath}}{{end}}' ./... | grep -vE '/(internal|examples)(/|$)')
for package in $packages; do
	cd "$work/old" && apidiff -w "$work/export" "$package"
	cd "$root"
	if ! go list "$package" >/dev/null 2>&1; then
		echo "api: $package is gone since $old"
		broken=1
		continue
	fi
	echo "api: $package since $old"
	apidiff "$work/export" "$package"
	if [ -n "$(apidiff -incompatible "$work/export" "$package")" ]; then
		broken=1
	fi
done
if [ "$broken" = 1 ]; then
	echo "api: incompatible changes since $old" >&2
	exit 1
fi
