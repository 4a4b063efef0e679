#!/usr/bin/env bash
# Applies the patches of this folder to the released sources of burn-autodiff, which contain no tests, and runs on the patched crate what
# the patches change (the example `upstream` of zero-param) and zero-param's laws. Needs the network or a filled Cargo cache.
#   docs/upstream/check.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^burn = .*version = "=\([^"]*\)".*/\1/p' zero-param/Cargo.toml)
work=$PWD/target/upstream crate=$PWD/target/upstream/burn-autodiff copy=$PWD/target/upstream/zero-param
(cd zero-param && cargo fetch --quiet)
rm -rf "$crate" "$copy" && mkdir -p "$work"
cp -r "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"burn-autodiff-$version" "$crate"
printf '\n[workspace]\n' >>"$crate/Cargo.toml"
for file in docs/upstream/*.patch; do
  echo "== $file"
  patch --directory "$crate" --strip 1 --forward <"$file"
done

mkdir "$copy"
cp -r zero-param/{Cargo.toml,Cargo.lock,README.md,src,tests,examples} "$copy"
sed -i 's|path = "\.\./|path = "../../../|' "$copy/Cargo.toml"
# Paths in tests and examples begin at the manifest.
ln -sfn "$PWD/tests" "$work/tests" && ln -sfn "$PWD/examples" "$work/examples" && ln -sfn "$PWD/docs" "$work/docs"
printf '\n[patch.crates-io]\nburn-autodiff = { path = "../burn-autodiff" }\n' >>"$copy/Cargo.toml"
export CARGO_TARGET_DIR=$work/build

echo '== what the patches change'
shown=$(cd "$copy" && cargo run --quiet --example upstream)
echo "$shown"
expect() { grep -q -- "$1" <<<"$shown" || { echo "expected: $1"; exit 1; }; }
expect ': 0 by embedding, 0 by select'
expect ': 0 by cast, 0 by mul_scalar'
expect '16 layers: 2 additional'
echo '== laws of zero-param on the patched crate'
export ZERO_PATCHED_BURN=1
(cd "$copy" && cargo test --quiet --test laws --test memory --test lora --test checkpointing --test burn_modules)
