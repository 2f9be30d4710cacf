#!/usr/bin/env bash
# Builds and installs Primus-Turbo from its source, if REBUILD_PRIMUS_TURBO=1; else does nothing.
#   REBUILD_PRIMUS_TURBO=1 scripts/rebuild_primus_turbo.sh [--dry-run]
# Every rank of a node may call it at once: one builds, the others wait and find it built. The same
# ref is built once per build folder; a build that broke off is taken up again by the next call.
#   PRIMUS_TURBO_REF        commit, tag or branch    (the oldest commit with both stages)
#   GPU_ARCHS               separated by semicolons  (gfx950)
#   PRIMUS_TURBO_BUILD_DIR  where to build           (${TMPDIR:-/tmp}/primus-turbo-<user>-<host>)
#   PRIMUS_TURBO_REPO       what to clone            (the public repository)
#   PYTHON                  whose pip installs       (python)
#   ROCM_PATH               where ROCm is            (/opt/rocm)
set -euo pipefail

say() { echo "rebuild_primus_turbo: $*" >&2; }
fail() { say "$*"; exit 1; }

dry_run=false
for word in "$@"; do
    case $word in
        --dry-run) dry_run=true ;;
        *) say "unknown argument '$word'; the only one is --dry-run"; exit 2 ;;
    esac
done
case ${REBUILD_PRIMUS_TURBO:-0} in
    1) ;;
    0 | "") exit 0 ;;
    *) say "REBUILD_PRIMUS_TURBO is '$REBUILD_PRIMUS_TURBO'; set it to 1 to build, or 0"; exit 2 ;;
esac

ref=${PRIMUS_TURBO_REF:-9b5d3092efcbc087657b233d8e9ae662cee6ec6b}
archs=${GPU_ARCHS:-gfx950}
repo=${PRIMUS_TURBO_REPO:-https://github.com/AMD-AGI/Primus-Turbo.git}
folder=${PRIMUS_TURBO_BUILD_DIR:-${TMPDIR:-/tmp}/primus-turbo-$(id -un)-$(hostname)}
python=${PYTHON:-python}
source=$folder/source
[[ $archs =~ ^gfx[0-9a-f]+(\;gfx[0-9a-f]+)*$ ]] ||
    fail "GPU_ARCHS is '$archs'; give names like gfx950, separated by semicolons"
[[ $ref != -* ]] || fail "PRIMUS_TURBO_REF is '$ref'; give a commit, a tag or a branch"

if $dry_run; then
    cat <<PLAN
would build Primus-Turbo
  ref     $ref
  from    $repo
  archs   $archs
  in      $folder
  with    $python -m pip install --no-build-isolation .[pytorch]
PLAN
    exit 0
fi

command -v git > /dev/null || fail "git is not in PATH; install it"
command -v flock > /dev/null || fail "flock is not in PATH; install util-linux"
rocm=${ROCM_PATH:-/opt/rocm}
[[ -x $rocm/bin/hipcc ]] ||
    fail "there is no ROCm compiler at $rocm/bin/hipcc; install ROCm 7.0 or later, or set ROCM_PATH"
"$python" -c 'import sys, torch; sys.exit(torch.version.hip is None)' 2> /dev/null ||
    fail "$python has no ROCm build of torch, which Primus-Turbo builds against; install it first"
mkdir -p "$folder" || fail "cannot create the build folder $folder; set PRIMUS_TURBO_BUILD_DIR"

# The lock is the open file's: it goes with this process, however that ends.
exec 9> "$folder/lock"
if ! flock --nonblock 9; then
    say "another process builds in $folder; waiting for it"
    flock 9
fi

# A clone that broke off is no repository, or one that git finds fault with.
git_in() { git -C "$source" "$@"; }
if [[ $(git_in rev-parse --show-toplevel 2> /dev/null) != "$(realpath -m "$source")" ]] ||
    ! git_in rev-parse --quiet --verify HEAD > /dev/null 2>&1 ||
    [[ $(git_in config remote.origin.url) != "$repo" ]]; then
    rm -rf "$source" "$source.partial"
    say "cloning $repo"
    git clone --quiet "$repo" "$source.partial" || fail "cannot clone $repo"
    mv "$source.partial" "$source"
fi
rm -f "$source/.git/index.lock" # of a checkout that broke off: nobody else is here

# A branch may have moved on, a commit that is here has not: with one, no network is needed.
if ! [[ $ref =~ ^[0-9a-f]{40}$ ]] || ! git_in cat-file -e "$ref^{commit}" 2> /dev/null; then
    git_in fetch --quiet --tags --force origin || fail "cannot fetch from $repo"
fi
commit=$(git_in rev-parse --quiet --verify "refs/remotes/origin/$ref^{commit}" ||
    git_in rev-parse --quiet --verify "$ref^{commit}") ||
    fail "PRIMUS_TURBO_REF '$ref' is no commit, tag or branch of $repo"

# What is installed, as far as it depends on us: another of these, another build.
wanted="$commit $archs $("$python" -c 'import sys, torch; print(sys.prefix, torch.__version__)')"
if [[ $(cat "$folder/installed" 2> /dev/null) == "$wanted" ]] &&
    "$python" -m pip show --quiet primus-turbo > /dev/null 2>&1; then
    say "commit $commit is installed already"
    exit 0
fi

rm -f "$folder/installed"
git_in checkout --quiet --force --detach "$commit"
git_in submodule sync --quiet --recursive
git_in submodule update --quiet --init --recursive --force || fail "cannot fetch the submodules"
say "building commit $commit for $archs; the log is $folder/build.log"
(
    cd "$source"
    export GPU_ARCHS=$archs
    "$python" -m pip install -r requirements.txt
    "$python" -m pip install --no-build-isolation ".[pytorch]"
) > "$folder/build.log" 2>&1 9>&- || {
    tail -n 20 "$folder/build.log" >&2
    fail "the build of commit $commit failed; see $folder/build.log"
}
echo "$wanted" > "$folder/installed"
say "commit $commit is installed"
