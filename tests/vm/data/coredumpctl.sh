#!/bin/sh
store=/var/lib/systemd/coredump
for pid; do :; done
file=$(ls $store/core.sh.*.boot.$pid.* 2>/dev/null)
if [ -z "$file" ]; then echo 'No coredumps found.' >&2; exit 1; fi
case "$*" in
*info*)
    printf '           PID: %s (sh)\n  Command Line: %s\n' $pid "$(cat $store/words.$pid)"
    printf '       Storage: %s (present)\n' $file ;;
*) while [ "$1" != -o ]; do shift; done
    cat $file >"$2" ;;
esac
