#!/bin/sh
# All tests, three at a time: most of them wait for nodes. Arguments go to pytest.
#
# A few that fail beside others run once more, alone: on a machine that is full, a process may not
# get the processor for seconds. Whatever fails alone, too, is a failure; what passes alone is
# named at the end, and is a race or a limit of the test to look for: why it failed stands above.
set -eu
cd "$(dirname "$0")/.."

most=5 # More than these are no accident of the machine.
run() {
    .venv/bin/python -m pytest --dist loadgroup "$@"
}
failed() {
    .venv/bin/python - <<'EOF'
import json, pathlib
path = pathlib.Path(".pytest_cache/v/cache/lastfailed")
print("\n".join(json.loads(path.read_text())) if path.exists() else "")
EOF
}

status=0
run --cache-clear -n "${NODEREADY_TEST_JOBS:-3}" "$@" || status=$?
[ "$status" -eq 1 ] || exit "$status"
names=$(failed)
count=$(printf '%s\n' "$names" | grep -c .) || exit 1
if [ "$count" -gt "$most" ]; then
    exit 1
fi
printf '\n%s failed beside others; once more, alone\n' "$count"
run --last-failed -n 0 "$@"
printf '\nfailed beside others, passed alone:\n%s\n' "$names"
